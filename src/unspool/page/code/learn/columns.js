// What the checkpoints nearest to the hand write, side by side. The one whose token was clicked is the ordinary
// text: every token is open, with attention over it, and the panels beside it.

import { jump, show } from "../actions.js";
import { openInWrite } from "../compare/popover.js";
import { TokenText } from "../compare/text.js";
import { count, html, isNarrow, nats, percent, useChanges, useEffect, useWidth } from "../lib.js";
import { meanEntropy, repeatedWords } from "../measures.js";
import { promptLength, state, textOf } from "../state.js";
import { Pane } from "../write/view.js";
import { checkpoints, learn, stepNow } from "./run.js";
import { along, framesAround, scale } from "./series.js";
import { showFrames, texts } from "./texts.js";
import { bits, compact, nats as short, shareOf } from "./words.js";

const NARROWEST = 250; // pixels of a column
const MOST = 6;

export function Columns() {
  useChanges("learn", "current", "selection", "branches");
  const [frame, width] = useWidth(900);
  const { saved, nearest } = inSight(Math.min(MOST, Math.max(1, Math.floor(width / NARROWEST))));
  useEffect(() => showFrames(saved.map(({ step }) => step)));
  const told = saved.map(numbersOf);
  const most = (name) => Math.max(1e-9, ...told.map((numbers) => numbers[name] ?? 0));
  const scales = { bits: most("bits"), entropy: most("entropy"), repeated: 1 };
  return html`<div class="lrn-columns" ref=${frame} role="group" aria-label="Checkpoints"
      style=${{ "--columns": Math.max(1, saved.length) }}>
    ${saved.map((each, at) => html`<${Column} key=${each.step} saved=${each} isNearest=${each === nearest}
      numbers=${told[at]} scales=${scales} />`)}
  </div>`;
}

/** The checkpoints around the step that is looked at, as near as they lie in the picture. */
function inSight(wanted) {
  const all = checkpoints();
  const { lines, view } = learn;
  const place = (step) => along(lines, view.axis, step);
  const unit = view.logX ? lines.find((line) => line[view.axis] > 0)?.[view.axis] ?? 1 : null;
  const { share } = scale(0, Math.max(1, place(all.at(-1)?.step ?? 1)), unit);
  const { nearest, start, end } = framesAround(all.map(({ step }) => share(place(step))), share(place(stepNow())), wanted);
  return { saved: all.slice(start, end), nearest: all[nearest] };
}

/** What the model knows at a checkpoint. */
function numbersOf(saved) {
  const branch = state.branches.get(texts.of.get(saved.step)?.id);
  const line = learn.lines.findLast(({ step, bits_per_byte }) => step <= saved.step && Number.isFinite(bits_per_byte));
  const card = learn.run.facts.data ?? {};
  const perToken = card.held_out_bytes / card.held_out_tokens || card.bytes_per_token;
  const derived = saved.held_out_loss != null && perToken ? saved.held_out_loss / Math.LN2 / perToken : null;
  return {
    held: saved.held_out_loss,
    bits: line?.bits_per_byte ?? derived,
    entropy: branch ? meanEntropy(branch.steps) : null,
    repeated: branch ? repeatedWords(textOf(branch)) : null,
  };
}

function Column({ saved, isNearest, numbers, scales }) {
  const { step, tokens } = saved;
  const text = texts.of.get(step);
  const branch = state.branches.get(text?.id);
  const name = `Step ${count(step)}`;
  return html`<section class=${`lrn-column panel ${isNearest ? "nearest" : ""}`} aria-label=${`${name}, ${shareOf(step, learn.run)}`}
      data-step=${step} aria-current=${isNearest ? "true" : null}>
    <header><h3>${shareOf(step, learn.run) || name}</h3>
      <span class="quiet small">step ${count(step)} · ${compact(tokens)} tokens</span></header>
    <div class="lrn-text">
      ${branch ? html`<${Text} branch=${branch} text=${text} name=${name} />` : html`<${Sample} step=${step} text=${text} />`}
      ${text?.fault && html`<p class="fault" role="alert">${text.fault}</p>`}
    </div>
    <${Numbers} numbers=${numbers} scales=${scales} />
    <button class="button tiny" disabled=${!branch?.steps.length} aria-label=${`Open ${name.toLowerCase()} in Write`}
      onClick=${() => openInWrite(branch.id)}>Open in Write</button>
  </section>`;
}

function Text({ branch, text, name }) {
  if (branch.id === state.current && state.selected !== null) return html`<${Open} />`;
  const pick = async (at) => {
    await jump(branch.id, promptLength(branch) + at);
    show(state.panel === "inside" ? "inside" : "step");
  };
  const words = branch.prompt?.messages?.at(-1).content ?? branch.prompt?.text;
  return html`<span class="quiet lrn-prompt">${words}${branch.prompt?.messages ? "\n" : ""}</span><${TokenText} steps=${branch.steps}
    label=${`Text at ${name.toLowerCase()}`} writing=${text.writing} pick=${pick} />`;
}

/** The ordinary text; the keys are its own from now on. */
function Open() {
  useEffect(() => {
    const text = document.getElementById("text");
    text.focus({ preventScroll: true });
    // A sheet comes up from below: the token stands above it then.
    if (isNarrow()) text.querySelector(".selected")?.scrollIntoView({ block: "start" });
  }, []);
  return html`<${Pane} />`;
}

/** What the run itself wrote at this time, until this checkpoint is asked. */
function Sample({ step, text }) {
  if (text?.writing) return html`<p class="quiet small" role="status">Loading the model of step ${count(step)} …</p>`;
  const sample = learn.samples.findLast((each) => each.step <= step);
  if (!sample || text?.fault) return null;
  return html`<p class="lrn-sample"><span class="quiet">${sample.prompt}</span>${sample.text}</p>
    <p class="quiet small">Written during the training${sample.step === step ? "" : `, at step ${count(sample.step)}`}.</p>`;
}

function Numbers({ numbers: { held, bits: perByte, entropy, repeated }, scales }) {
  const bar = (value, most) => html`<div class="track" aria-hidden="true">
    <span style=${{ width: `${value === null ? 0 : Math.min(1, value / most) * 100}%` }} /></div>`;
  return html`<dl class="cmp-numbers">
    <dt title="How many bits it takes to write down held-out text with this model">Bits per byte</dt>
    <dd data-number="bits">${bar(perByte, scales.bits)}${bits(perByte)}</dd>
    <dt title="Mean loss on text that was kept from the training">Held-out loss</dt><dd data-number="held">${short(held)}</dd>
    <dt title="How undecided the model was before each token of this text, on average">Entropy</dt>
    <dd data-number="entropy">${bar(entropy, scales.entropy)}${nats(entropy)}${entropy === null ? "" : " nats"}</dd>
    <dt title="Share of words that stood among the twenty words before">Repeated words</dt>
    <dd data-number="repeated">${bar(repeated, scales.repeated)}${percent(repeated)}</dd>
  </dl>`;
}
