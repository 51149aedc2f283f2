// Saving the session to a file, and loading one: read, checked, replayed, shown.

import { count, html, plural, save, spelled, useEffect, useRef, useState } from "../lib.js";
import { state } from "../state.js";
import { connect, ensureSteps } from "../actions.js";
import { readSession } from "./check.js";
import { listenForFiles, readDropped } from "./drop.js";
import { replay, workOf } from "./replay.js";
import { restore } from "./restore.js";
import { fileName, packed } from "./session.js";

export function SessionPart({ busy, close }) {
  const picker = useRef();
  const [now, setNow] = useState({ kind: "idle" });
  const load = useLoading(setNow, busy);
  useEffect(() => {
    const leave = [listenForFiles(() => {}), readDropped((file) => busy.current || load.read(file))];
    return () => {
      leave.forEach((stop) => stop());
      busy.current?.();
    };
  }, []);
  const picked = (event) => {
    const [file] = event.target.files;
    event.target.value = ""; // the same file may be chosen again
    if (file) load.read(file);
  };
  const keep = async () => {
    try {
      for (const id of state.branches.keys()) await ensureSteps(id);
    } catch (error) {
      setNow({ kind: "fault", words: `Not saved. ${error.message}` });
      return;
    }
    const session = packed();
    const name = fileName(state.branches.get(state.current), "json");
    save(name, new Blob([JSON.stringify(session)], { type: "application/json" }));
    setNow({ kind: "done", words: `Saved ${plural(session.branches.length, "branch", "branches")} as ${name}.` });
  };
  const isBusy = now.kind === "replaying" || now.kind === "reading";
  return html`<section class="share-part">
    <div><h3>Session</h3><p class="quiet small">A file with every branch and every number of this page. Loading it, or
      dropping it on the page, lets the model write it all again and compares every token.</p></div>
    <div class="row">
      <button class="button main" id="save-session" disabled=${!state.branches.size || isBusy || state.writing !== null} onClick=${keep}>Save</button>
      <button class="button" id="load-session" disabled=${isBusy} onClick=${() => picker.current.click()}>Load …</button>
      <input type="file" id="session-file" hidden ref=${picker}
        accept=".json,application/json" onChange=${picked} />
    </div>
    <div class="share-news" aria-live="polite"><${News} now=${now} load=${load} close=${close} /></div>
  </section>`;
}

/** What is being done, or how it ended. */
function News({ now, load, close }) {
  const recorded = html`<button class="button tiny" onClick=${() => load.asRecorded(now.session)}>Show as recorded</button>`;
  if (now.kind === "reading") return html`<p class="small quiet">Reading the file …</p>`;
  if (now.kind === "replaying") {
    return html`<p class="small" id="replaying">Replaying: ${count(now.done)} of ${plural(now.total, "token")}</p>
      <div class="row"><progress class="grow" max=${Math.max(1, now.total)} value=${now.done} aria-label="Replayed tokens"></progress>
      <button class="button tiny" id="cancel-replay" onClick=${load.cancel}>Cancel</button></div>`;
  }
  if (now.kind === "asking") {
    return html`<p class="small">${now.words}</p><div class="row">
      ${now.canReplay && html`<button class="button tiny" onClick=${() => load.replayed(now.session)}>Replay all the same</button>`}
      ${recorded}</div>`;
  }
  if (now.kind === "broken") {
    return html`<p class="small bad" role="alert">${now.words}</p><div class="row">
      <button class="button tiny" onClick=${() => load.replayed(now.session)}>Try again</button>${recorded}</div>`;
  }
  if (now.kind === "fault") return html`<p class="small bad" role="alert" id="session-fault">${now.words}</p>`;
  if (now.kind === "done") return html`<p class="small good" id="session-done">${now.words}</p>`;
  if (now.kind === "shown") {
    return html`<div id="session-done">${now.lines.map((line) => html`<p class=${`small ${now.same ? "good" : ""}`}>${line}</p>`)}</div>
      <div><button class="button tiny" onClick=${close}>To the text</button></div>`;
  }
  return null;
}

/** The steps from a file to the page, each of which tells how it goes. */
function useLoading(setNow, busy) {
  const control = useRef(null);
  const cancel = () => control.current?.abort();
  const shown = async (session, results, lines, same) => {
    await restore(session, results);
    setNow({ kind: "shown", lines, same });
  };
  const asRecorded = (session) => shown(session, null, [
    `${plural(session.branches.length, "branch", "branches")} shown as recorded: to read, to look at and to play, but not to go on with.`,
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
      await shown(session, results, differing.length ? differences(session, differing) : [allSame(session, total)], !differing.length);
    } catch (error) {
      if (error.name === "AbortError") setNow({ kind: "done", words: "Cancelled. Nothing has changed." });
      else {
        if (error.gone) connect();
        const where = done ? ` after ${count(done)} of ${plural(total, "token")}` : "";
        setNow({ kind: "broken", session, words: `The replay stopped${where}. ${error.message}` });
      }
    } finally {
      busy.current = null;
    }
  };

  const read = async (file) => {
    setNow({ kind: "reading" });
    let session;
    try {
      session = await readSession(file);
    } catch (error) {
      setNow({ kind: "fault", words: error.message });
      return;
    }
    const doubt = doubtOf(session);
    if (doubt) setNow({ kind: "asking", session, ...doubt });
    else await replayed(session);
  };
  return { read, replayed, asRecorded, cancel };
}

const allSame = (session, total) =>
  `Replayed ${plural(session.branches.length, "branch", "branches")}, ${plural(total, "token")}: every token the same.`;

/** Why a replay may not give the same, before it is tried; null: nothing speaks against it. */
function doubtOf(session) {
  if (!session.branches.length) return { canReplay: false, words: "The session has no branches." };
  if (!state.server.ready) return { canReplay: false, words: "The server does not answer, so the session cannot be replayed now." };
  const missing = session.branches.find(({ model }) => !state.models.some(({ id }) => id === model));
  if (missing) {
    return { canReplay: false, words: `The session was written by ${missing.model}, which this server does not have.` };
  }
  return hasSameFingerprint(session) ? null : {
    canReplay: true,
    words: `The session was written by another build of ${session.model.id} (${session.model.system_fingerprint}, here `
      + `${fingerprintOf(session.model.id)}), so its words may come out otherwise.`,
  };
}

const fingerprintOf = (id) => state.models.find((model) => model.id === id)?.unspool.system_fingerprint ?? null;
const hasSameFingerprint = ({ model }) => fingerprintOf(model.id) === model.system_fingerprint;

/** Where the replay differs first in each branch, and why that can be. */
function differences(session, differing) {
  const lines = differing.slice(0, 3).map(({ branch, differs }) => {
    const name = branch.name ? `“${branch.name}”` : "A branch";
    const wanted = spelled(branch.steps[differs.index].piece);
    const wrote = differs.wrote === null ? "nothing" : `“${spelled(differs.wrote)}”`;
    return `${name} differs from token ${count(differs.index + 1)} on: the file has “${wanted}”, the model wrote ${wrote}.`;
  });
  if (differing.length > 3) lines.push(`So do ${count(differing.length - 3)} more.`);
  const why = hasSameFingerprint(session)
    ? "The model is the same, so the file was changed, or another kind of processor rounds its numbers otherwise."
    : "The model is another one than the file's.";
  const what = differing.length === 1 ? "That branch is" : "Those branches are";
  return [...lines, `${why} ${what} shown as recorded: to read and to play, but not to go on with.`];
}
