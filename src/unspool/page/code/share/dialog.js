// The Share dialog: save and open files, play a text, export it for other programs, as a picture or as a program.

import { connect } from "../actions.js";
import {
  copyText, count, html, listenForDrops, plural, readDroppedFiles, saveFile, Tabs, useChanges, useEffect, useRef,
  useState, visibleText,
} from "../lib.js";
import { markdownOf, programs } from "./export.js";
import { packFile, readText } from "./file.js";
import { asPlain, FORMATS, lossesOf, readTexts, treeOf } from "./formats.js";
import { saveParts } from "../write/parts.js";
import { importTrees, sizeOf } from "./import.js";
import { pictureOf, pixels, svgText } from "./picture.js";
import { openPlayBar, SPEEDS } from "./playback.js";
import { linkOf } from "./link.js";
import { fileName, isSession, loadBranch, packSession, parseSession, replay, showSession, workOf } from "./session.js";
import { currentBranch, samePrompt, state } from "../state.js";
import { isTab } from "../tab/client.js";

const OTHERS = Object.values(FORMATS).map(({ title }) => title.replace("Plain", "plain")).join(", ").replace(/, ([^,]*)$/, " and $1");

function SessionSection({ busy, close }) {
  const picker = useRef();
  const [now, setNow] = useState({ kind: "idle" });
  const load = useSessionLoader(setNow, busy);
  useEffect(() => {
    const leave = [listenForDrops(() => {}), readDroppedFiles((file) => busy.current || load.read(file))];
    return () => {
      leave.forEach((stop) => stop());
      busy.current?.();
    };
  }, []);
  const picked = (event) => {
    const [file] = event.target.files;
    event.target.value = ""; // so that the same file can be chosen again
    if (file) load.read(file);
  };
  const keep = async () => {
    try {
      for (const id of state.branches.keys()) await loadBranch(id);
    } catch (error) {
      setNow({ kind: "fault", words: `Not saved. ${error.message}` });
      return;
    }
    const session = packSession();
    const name = fileName(state.branches.get(state.current), "json.gz");
    saveFile(name, await packFile(session));
    setNow({ kind: "done", words: `Saved ${plural(session.branches.length, "branch", "branches")} as ${name}.` });
  };
  const isBusy = now.kind === "replaying" || now.kind === "reading";
  return html`<section class="share-part">
    <div><h3>Session</h3><p class="quiet small">A file with all branches and steps. Loading it (or dropping it on the page)
      generates everything again with the same seeds and compares every token. Files of ${OTHERS} can be loaded too.</p></div>
    <div class="row">
      <button class="button main" id="save-session" disabled=${!state.branches.size || isBusy || state.writing !== null} onClick=${keep}>Save</button>
      <button class="button" id="load-session" disabled=${isBusy} onClick=${() => picker.current.click()}>Load …</button>
      <input type="file" id="session-file" hidden ref=${picker}
        accept=".json,.gz,.jsonl,.md,.txt,application/json,text/*" onChange=${picked} />
    </div>
    <div class="share-news" aria-live="polite"><${Status} now=${now} load=${load} close=${close} /></div>
  </section>`;
}

/** Progress or result of saving and loading. */
function Status({ now, load, close }) {
  const recorded = html`<button class="button tiny" onClick=${() => load.asRecorded(now.session)}>Show the recording</button>`;
  if (now.kind === "reading") return html`<p class="small quiet">Reading the file …</p>`;
  if (now.kind === "replaying") {
    const { label = "Replaying", unit = "token" } = now;
    return html`<p class="small" id="replaying">${label}: ${count(now.done)} of ${plural(now.total, unit)}</p>
      <div class="row"><progress class="grow" max=${Math.max(1, now.total)} value=${now.done} aria-label=${label}></progress>
      <button class="button tiny" id="cancel-replay" onClick=${load.cancel}>Cancel</button></div>`;
  }
  if (now.kind === "asking") {
    return html`<p class="small">${now.words}</p><div class="row">
      ${now.canReplay && html`<button class="button tiny" onClick=${() => load.replayed(now.session)}>Replay anyway</button>`}
      ${recorded}</div>`;
  }
  if (now.kind === "refused") {
    return html`<p class="small bad" role="alert" id="session-fault">${now.words}</p>${now.plain
      && html`<div><button class="button tiny" onClick=${() => load.imported(now.plain)}>Open as plain text</button></div>`}`;
  }
  if (now.kind === "broken") {
    return html`<p class="small bad" role="alert">${now.words}</p><div class="row">
      <button class="button tiny" onClick=${() => load.replayed(now.session)}>Try again</button>${recorded}</div>`;
  }
  if (now.kind === "fault") return html`<p class="small bad" role="alert" id="session-fault">${now.words}</p>`;
  if (now.kind === "done") return html`<p class="small good" id="session-done">${now.words}</p>`;
  if (now.kind === "shown") {
    return html`<div id="session-done">${now.lines.map((line) => html`<p class=${`small ${now.same ? "good" : ""}`}>${line}</p>`)}</div>
      <div><button class="button tiny" onClick=${close}>Show the text</button></div>`;
  }
  return null;
}

/** Load a file: read, validate, replay, show; each step sets the status. */
function useSessionLoader(setNow, busy) {
  const control = useRef(null);
  const cancel = () => control.current?.abort();
  const showLoaded = async (session, results, lines, isSame) => {
    await showSession(session, results);
    setNow({ kind: "shown", lines, same: isSame });
  };
  const asRecorded = (session) => showLoaded(session, null, [
    `${plural(session.branches.length, "branch", "branches")} shown as recorded: they can be inspected and played, not continued.`,
  ], true);

  const replayed = async (session) => {
    control.current = new AbortController();
    busy.current = cancel;
    const total = workOf(session);
    let done = 0;
    const tell = () => setNow({ kind: "replaying", done, total });
    tell();
    try {
      const progress = (tokens) => {
        done = tokens;
        tell();
      };
      const results = await replay(session, { signal: control.current.signal, progress });
      const differing = results.filter(({ differs }) => differs);
      await showLoaded(session, results, differing.length ? differences(session, differing) : [allSame(session, total)], !differing.length);
    } catch (error) {
      if (error.name === "AbortError") setNow({ kind: "done", words: "Cancelled. Nothing has changed." });
      else {
        if (error.isOffline) connect();
        const where = done ? ` after ${count(done)} of ${plural(total, "token")}` : "";
        setNow({ kind: "broken", session, words: `The replay stopped${where}. ${error.message}` });
      }
    } finally {
      busy.current = null;
    }
  };

  const imported = async ({ trees, notes, format }) => {
    control.current = new AbortController();
    busy.current = cancel;
    const total = sizeOf(trees);
    const progress = (done) => setNow({ kind: "replaying", label: "Loading", unit: "text", done, total });
    progress(0);
    try {
      const branches = await importTrees(trees, { signal: control.current.signal, progress });
      setNow({ kind: "shown", same: true, lines: [`Loaded ${plural(branches, "branch", "branches")} (${FORMATS[format]?.title ?? "KoboldAI"}).`, ...notes] });
    } catch (error) {
      if (error.name === "AbortError") setNow({ kind: "done", words: "Cancelled. Nothing has changed." });
      else {
        if (error.isOffline) connect();
        const isChat = trees.some((tree) => tree.isChat);
        const plain = isChat && error.status === 400 && error.code !== "context_length_exceeded" ? { trees: trees.map(asPlain), notes, format } : null;
        setNow({ kind: "refused", words: `Not loaded. ${error.message}`, plain });
      }
    } finally {
      busy.current = null;
    }
  };

  const read = async (file) => {
    setNow({ kind: "reading" });
    let session;
    try {
      const text = await readText(file);
      if (!isSession(text)) {
        const texts = readTexts(text, file.name);
        if (!state.server.ready) throw new Error("The server does not answer: the file cannot be loaded now.");
        await imported(texts);
        return;
      }
      session = parseSession(text);
    } catch (error) {
      setNow({ kind: "fault", words: error.message });
      return;
    }
    const doubt = replayWarning(session);
    if (doubt) setNow({ kind: "asking", session, ...doubt });
    else await replayed(session);
  };
  return { read, replayed, imported, asRecorded, cancel };
}

const allSame = (session, total) =>
  `Replayed ${plural(session.branches.length, "branch", "branches")}, ${plural(total, "token")}: all tokens are the same.`;

/** Why a replay may fail or differ; null: no reason. */
function replayWarning(session) {
  if (!session.branches.length) return { canReplay: false, words: "The session has no branches." };
  if (!state.server.ready) return { canReplay: false, words: "The server does not answer: the session cannot be replayed now." };
  const missing = session.branches.find(({ model }) => !state.models.some(({ id }) => id === model));
  if (missing) {
    return { canReplay: false, words: `The session needs the model ${missing.model}, which this server does not have.` };
  }
  return hasSameFingerprint(session) ? null : {
    canReplay: true,
    words: `The session was generated by another build of ${session.model.id} (${session.model.system_fingerprint}, here `
      + `${fingerprintOf(session.model.id)}), so the text may differ.`,
  };
}

const fingerprintOf = (id) => state.models.find((model) => model.id === id)?.unspool.system_fingerprint ?? null;
const hasSameFingerprint = ({ model }) => fingerprintOf(model.id) === model.system_fingerprint;

/** The first difference in each branch, and its possible reasons. */
function differences(session, differing) {
  const lines = differing.slice(0, 3).map(({ branch, differs }) => {
    const name = branch.name ? `“${branch.name}”` : "A branch";
    const expected = visibleText(branch.steps[differs.index].piece);
    const wrote = differs.wrote === null ? "nothing" : `“${visibleText(differs.wrote)}”`;
    return `${name} differs from token ${count(differs.index + 1)} on: the file has “${expected}”, the model generated ${wrote}.`;
  });
  if (differing.length > 3) lines.push(`${count(differing.length - 3)} more differ.`);
  const why = hasSameFingerprint(session)
    ? "The model is the same: the file was edited, or another processor rounds differently."
    : "The model is not that of the file.";
  const what = differing.length === 1 ? "That branch is" : "Those branches are";
  return [...lines, `${why} ${what} shown as recorded: they can be inspected and played, not continued.`];
}

// -- the dialog -----------------------------------------------------------------------------------

export function ShareDialog({ close }) {
  useChanges("current", "branches", "steps");
  const dialog = useRef();
  const busy = useRef(null); // cancels a running replay: Escape does that before it closes the dialog
  useEffect(() => {
    if (!dialog.current.open) dialog.current.showModal();
  }, []);
  const onCancel = (event) => {
    if (event.target !== dialog.current || !busy.current) return;
    event.preventDefault();
    busy.current();
  };
  const branch = currentBranch();
  return html`<dialog ref=${dialog} class="dialog share" id="share-dialog" aria-labelledby="share-title"
      onClose=${(event) => event.target === dialog.current && close()} onCancel=${onCancel}>
    <form method="dialog" class="row spread"><h2 id="share-title">Share</h2>
      <button class="button tiny" aria-label="Close" title="Close (Escape)">✕</button></form>
    <${SessionSection} busy=${busy} close=${() => dialog.current.close()} />
    ${branch?.prompt
      ? html`<${LinkPart} branch=${branch} />
        <${PlayPart} branch=${branch} close=${() => dialog.current.close()} />
        <${PicturePart} branch=${branch} />
        <${ExportPart} branch=${branch} />
        <${TextPart} branch=${branch} />
        <${ProgramPart} branch=${branch} />`
      : html`<p class="quiet small">Generate a text first to export it.</p>`}
  </dialog>`;
}

/** A section of the dialog: a title, a sentence, buttons. */
function Part({ title, says, children }) {
  return html`<section class="share-part"><div><h3>${title}</h3><p class="quiet small">${says}</p></div>
    <div class="row">${children}</div></section>`;
}

function LinkPart({ branch }) {
  const [fault, setFault] = useState(null);
  const text = () => {
    setFault(null);
    return linkOf(branch.id).catch((error) => setFault(error.message) ?? "");
  };
  return html`<${Part} title="Link" says=${`Opens this text here: the page generates it again with the same seed${isTab ? ", without a server" : ""}.`}>
    ${!branch.recorded && html`<${CopyButton} id="copy-link" text=${text} />`}
    ${fault && html`<p class="bad small" role="alert">${fault}</p>`}
  <//>`;
}

function PlayPart({ branch, close }) {
  const start = (speed) => () => {
    close();
    openPlayBar(speed);
  };
  return html`<${Part} title="Play" says="Shows the recorded text again, token by token, without computing it.">
    ${SPEEDS.map(([speed, name]) => html`<button class="button" disabled=${!branch.steps.length || state.writing !== null}
      aria-label=${`Play at ${name} of the recorded speed`} onClick=${start(speed)}>${name}</button>`)}
  <//>`;
}

function PicturePart({ branch }) {
  const [fault, setFault] = useState(null);
  const savePicture = (kind) => async () => {
    setFault(null);
    try {
      const picture = pictureOf(document.getElementById("view"));
      const file = kind === "svg" ? new Blob([svgText(picture)], { type: "image/svg+xml" }) : await pixels(picture);
      saveFile(fileName(branch, kind), file);
    } catch (error) {
      setFault(error.message);
    }
  };
  return html`<${Part} title="Picture" says="The current view as SVG or PNG.">
    <button class="button" id="save-svg" onClick=${savePicture("svg")}>SVG</button>
    <button class="button" id="save-png" onClick=${savePicture("png")}>PNG</button>
    ${fault && html`<p class="bad small" role="alert">${fault}</p>`}
  <//>`;
}

/** Save the current text with its branches in a format of another program; says before what that format cannot hold. */
function ExportPart({ branch }) {
  const [format, setFormat] = useState("openloom");
  const [fault, setFault] = useState(null);
  const { input, holds, write, extension } = FORMATS[format];
  const all = [...state.branches.values()];
  const related = [branch, ...all.filter((other) => other !== branch && (other.prompt ? samePrompt(other, branch) : true))];
  const isLoaded = related.every((other) => other.prompt && (other.isLoaded || other.recorded));
  const losses = isLoaded ? lossesOf(format, { ...treeOf(related, input), parts: state.parts }, { others: numPrompts(all) - 1 }) : [];
  useEffect(() => {
    Promise.all(related.map(({ id }) => loadBranch(id))).catch((error) => setFault(error.message)); // told by "branches"
  }, [branch.id]);
  const save = () => {
    setFault(null);
    try {
      const tree = { ...treeOf(holds === "one" ? [branch] : related, input), parts: saveParts() };
      saveFile(fileName(branch, extension), new Blob([write(tree, { now: new Date().toISOString() })]));
    } catch (error) {
      setFault(error.message);
    }
  };
  return html`<section class="share-part" id="export-part">
    <div><h3>Export</h3><p class="quiet small">This text with its branches, for another program.</p></div>
    <div class="row">
      <select class="field" id="export-format" aria-label="Format" value=${format} onChange=${(event) => setFormat(event.target.value)}>
        ${Object.entries(FORMATS).map(([id, { title }]) => html`<option value=${id}>${title}</option>`)}
      </select>
      <button class="button" id="save-export" disabled=${!isLoaded || state.writing !== null} onClick=${save}>Export</button>
    </div>
    <ul class="quiet small losses">${losses.map((words) => html`<li>${words}</li>`)}</ul>
    ${fault && html`<p class="bad small" role="alert">${fault}</p>`}
  </section>`;
}

/** Number of different prompts of branches. */
function numPrompts(branches) {
  const first = [];
  for (const branch of branches) if (branch.prompt && !first.some((other) => samePrompt(other, branch))) first.push(branch);
  return Math.max(1, first.length);
}

function TextPart({ branch }) {
  const text = async () => {
    await loadBranch(branch.id);
    return markdownOf(branch);
  };
  const saveMarkdown = async () => saveFile(fileName(branch, "md"), new Blob([await text()], { type: "text/markdown" }));
  return html`<${Part} title="Report" says="Markdown with the prompt, the text, the settings and the least likely tokens.">
    <button class="button" id="save-markdown" onClick=${saveMarkdown}>Markdown</button>
    <${CopyButton} id="copy-markdown" text=${text} />
  <//>`;
}

/** Copies the result of `text()`. */
function CopyButton({ id, text }) {
  const [label, setSaid] = useState("Copy");
  const copy = async () => {
    setSaid((await copyText(await text())) ? "Copied" : "Not allowed here");
    setTimeout(() => setSaid("Copy"), 2000);
  };
  return html`<button class="button" id=${id} onClick=${copy}><span aria-live="polite">${label}</span></button>`;
}

const LANGUAGES = { ...(isTab ? {} : { curl: "curl", openai: "Python, openai" }), unspool: "Python, unspool" };

function ProgramPart({ branch }) {
  const [language, setLanguage] = useState(Object.keys(LANGUAGES)[0]);
  const { code, note } = programs(branch)[language];
  return html`<section class="share-part wide">
    <div><h3>Program</h3><p class="quiet small">Generates the same text, token for token${
      language === "unspool" ? ", without a server" : ", from this server"}.</p></div>
    <div class="row spread">
      <${Tabs} label="Program" prefix="language" controls="program" tabs=${LANGUAGES} now=${language} pick=${setLanguage} />
      ${code !== null && html`<${CopyButton} id="copy-program" text=${() => code} />`}
    </div>
    <div id="program" role="tabpanel" aria-labelledby=${`language-${language}`}>
      ${note && html`<p class="small program-note">${note}</p>`}
      ${code !== null && html`<pre class="program mono small" tabindex="0" dir="ltr">${code}</pre>`}
    </div>
  </section>`;
}
