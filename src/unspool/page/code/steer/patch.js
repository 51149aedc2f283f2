// The Patching section of the Inside panel: a clean text, a corrupted one that differs in a token, and a heatmap of the
// logit difference of two answers, layer by layer and position by position, filled while it is computed.

import { api } from "../api.js";
import { placeInText } from "../inside/lookups.js";
import { html, Piece, RequestError, useChanges, useEffect, useRef, useRequest, useState, useWidth, visibleText } from "../lib.js";
import { currentBranch, state, tokenAt } from "../state.js";
import { PART_NAMES } from "./changes.js";

const SITES = ["resid_post", "attn_out", "mlp_out"];
const MAX_END = 512; // tokens of the clean text; of the server
const TEXT_TOKENS = 20; // of the text of a cell
const TYPING_MS = 400;
const LABEL_WIDTH = 28;

const asToken = (text) => text.replaceAll("␣", " ");

/** The text up to the selected token is the clean one. */
export function Patching() {
  useChanges("current", "selection", "server");
  const branch = currentBranch();
  const end = state.selected + 1;
  const { key } = placeInText(branch, state.selected);
  const [position, setPosition] = useState(null);
  const [values, setValues] = useState({ token: "", answer: "", other: "", site: "resid_post" });
  useEffect(() => setPosition(null), [branch.id]);
  const at = position !== null && position < end ? position : null;
  const set = (name) => ({ target }) => setValues({ ...values, [name]: target.value });
  if (end > MAX_END) return html`<p class="quiet small">Patching takes texts of at most ${MAX_END} tokens; select an earlier token.</p>`;
  const choices = Array.from({ length: end }, (_, index) => end - 1 - index).filter((index) => !tokenAt(branch, index).added);
  const body = at === null || !values.token ? null : {
    end, replace: { position: at, token: asToken(values.token) }, site: values.site,
    ...(values.answer ? { answer: asToken(values.answer) } : {}), ...(values.other ? { other: asToken(values.other) } : {}),
  };
  return html`
    <p class="quiet small">Which activation carries a fact? The clean text ends with <${Piece} text=${tokenAt(branch, state.selected)?.text} />. The corrupted
      text has another token in one place. Each cell is the corrupted text with one activation of the clean text.</p>
    <div class="row small">
      <label>Replace <select class="field inside-choice patch-position" id="patch-position" value=${at ?? ""} onChange=${({ target }) => setPosition(Number(target.value))}>
        <option value="" disabled>a token …</option>
        ${choices.map((index) => html`<option value=${index}>${index}: ${visibleText(tokenAt(branch, index).text)}</option>`)}</select></label>
      <label>by <input class="field steer-token mono" id="patch-token" placeholder="for example ␣France" value=${values.token} onInput=${set("token")} /></label>
    </div>
    <div class="row small">
      <label>Part <select class="field inside-choice" id="patch-site" value=${values.site} onChange=${set("site")}>
        ${SITES.map((site) => html`<option value=${site}>${PART_NAMES[site]}</option>`)}</select></label>
      <label>Answer <input class="field patch-answer mono" id="patch-answer" placeholder="most likely" value=${values.answer} onInput=${set("answer")} /></label>
      <label>instead of <input class="field patch-answer mono" id="patch-other" placeholder="most likely" value=${values.other} onInput=${set("other")} /></label>
    </div>
    ${body && html`<${Sweep} branch=${branch} textKey=${key} body=${body} />`}`;
}

/** Requests the table; `table` grows with each row. */
function Sweep({ branch, textKey, body }) {
  const [table, setTable] = useState({ key: "", start: null, rows: new Map() });
  const key = `${textKey} ${JSON.stringify(body)}`;
  const ask = async (signal) => {
    let now = { key, start: null, rows: new Map() };
    for await (const { event, data } of api.stream(`/v1/tree/${branch.id}/patch`, body, { signal })) {
      if (event === "start") now = { ...now, start: data };
      else if (event === "row") now = { ...now, rows: new Map(now.rows).set(data.layer, data.values) };
      if (!signal.aborted) setTable(now);
    }
    return now;
  };
  const request = useRequest(ask, TYPING_MS, [key, state.server.ready]);
  const [cell, setCell] = useState(null);
  useEffect(() => setCell(null), [key]);
  const { start, rows } = table.key === key ? table : { start: null, rows: new Map() };
  if (request.fault) return html`<${RequestError} ...${request} />`;
  if (!start) return html`<p class="quiet small" role="status">Computing …</p>`;
  const numRows = start.layers.length;
  return html`
    <p class="small">The metric is the logit of <${Piece} text=${start.answer.text} /> minus that of <${Piece} text=${start.other.text} />:${" "}
      <b>${metricText(start.clean)}</b> in the clean run, <b>${metricText(start.corrupted)}</b> in the corrupted one.</p>
    <${Heatmap} start=${start} rows=${rows} cell=${cell} pick=${setCell} />
    <p class="quiet small" role="status">${rows.size < numRows ? `${rows.size} of ${numRows} layers …` : `All ${numRows} layers.`} Click a cell to see its text.</p>
    ${cell && rows.has(cell.layer) && html`<${CellText} key=${`${cell.layer} ${cell.position}`} branch=${branch} body=${body} cell=${cell} start=${start} value=${
      rows.get(cell.layer)[start.positions.indexOf(cell.position)]} />`}`;
}

/** -1 (away from the clean run) to 1 (as in the clean run); 0: as in the corrupted run. */
const shareOf = (value, { clean, corrupted }) => Math.max(-1, Math.min(1, (value - corrupted) / (clean - corrupted || 1)));

const restoredText = (value, { clean, corrupted }) => `${Math.round((100 * (value - corrupted)) / (clean - corrupted || 1))}\u00a0%`.replace("-", "−");
const metricText = (value) => value.toFixed(2).replace("-", "−");

const describe = ({ layer, position }, value, start) => {
  const place = `layer ${layer + 1}, position ${position} (${visibleText(start.clean_tokens[position].text)})`;
  return value === undefined ? `${place}: not computed yet` : `${place}: ${metricText(value)}, ${restoredText(value, start)} restored`;
};

function Heatmap({ start, rows, cell, pick }) {
  const [box, width] = useWidth();
  const grid = useRef(null);
  const [pointed, setPointed] = useState(null);
  const { layers, positions } = start;
  const wide = Math.max(9, Math.min(40, (width - LABEL_WIDTH) / positions.length));
  const high = layers.length > 40 ? 8 : 12;
  const hand = pointed ?? cell ?? { layer: layers.at(-1), position: positions.at(-1) };
  const valueOf = ({ layer, position }) => rows.get(layer)?.[positions.indexOf(position)];
  const onKey = (event) => {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      pick(hand);
    } else if (moves[event.key]) {
      event.preventDefault();
      const [up, right] = moves[event.key];
      const within = (list, item, by) => list[Math.max(0, Math.min(list.length - 1, list.indexOf(item) + by))];
      setPointed({ layer: within(layers, hand.layer, up), position: within(positions, hand.position, right) });
    }
  };
  const y = (layer) => (layers.length - 1 - layers.indexOf(layer)) * high;
  const x = (position) => LABEL_WIDTH + positions.indexOf(position) * wide;
  const size = { width: LABEL_WIDTH + wide * positions.length, height: layers.length * high + 14 };
  const at = (event) => {
    const { layer, position } = event.target.dataset;
    return layer === undefined ? null : { layer: Number(layer), position: Number(position) };
  };
  return html`<div ref=${box} class="patch-map">
    <div class="patch-scroll" tabindex="0" role="application" ref=${grid} onKeyDown=${onKey} onBlur=${() => setPointed(null)}
      aria-label=${`Heatmap of ${layers.length} layers and ${positions.length} positions; arrow keys move, Enter shows the text of a cell. ${describe(hand, valueOf(hand), start)}`}>
      <svg width=${size.width} height=${size.height} aria-hidden="true"
        onPointerMove=${(event) => setPointed(at(event))} onPointerLeave=${() => setPointed(null)} onClick=${(event) => at(event) && pick(at(event))}>
        ${layers.filter((layer) => (layer + 1) % 5 === 0 || layer === layers[0]).map((layer) => html`<text x=${LABEL_WIDTH - 5} y=${y(layer) + high / 2} dy="0.35em" text-anchor="end">${layer + 1}</text>`)}
        ${layers.map((layer) => positions.map((position, column) => {
          const value = rows.get(layer)?.[column];
          const share = value === undefined ? 0 : shareOf(value, start);
          return html`<rect key=${`${layer} ${position}`} data-layer=${layer} data-position=${position} x=${x(position)} y=${y(layer)} width=${wide} height=${high}
            class=${value === undefined ? "waiting" : share < 0 ? "away" : "restored"} style=${{ "--share": Math.abs(share).toFixed(3) }} />`;
        }))}
        ${[cell, pointed].filter(Boolean).map((item) => html`<rect class="patch-hand" x=${x(item.position)} y=${y(item.layer)} width=${wide} height=${high} />`)}
        ${positions.filter((_, column) => column % Math.ceil(24 / wide) === 0).map((position) => html`<text x=${x(position) + wide / 2} y=${size.height - 3} text-anchor="middle">${position}</text>`)}
      </svg>
    </div>
    <p class="small patch-told">${describe(hand, valueOf(hand), start)}</p>
    <p class="quiet small row patch-scale"><span>away</span><span class="patch-ramp" aria-hidden="true">${[-1, -0.6, -0.3, 0, 0.3, 0.6, 1].map((share) => html`<i
      class=${share < 0 ? "away" : "restored"} style=${{ "--share": Math.abs(share) }}></i>`)}</span><span>as in the clean run</span></p>
  </div>`;
}

/** The text that the corrupted run continues with under the patch of a cell. */
function CellText({ branch, body, cell, start, value }) {
  const ask = (signal) => api.post(`/v1/tree/${branch.id}/patch`, { ...body, cell, max_tokens: TEXT_TOKENS }, { signal });
  const { answer, fault, again } = useRequest(ask, 0, [JSON.stringify([body, cell])]);
  const inLine = (text) => text.replaceAll("\n", "⏎");
  return html`<div class="steer-texts" id="patch-text" aria-busy=${!answer}>
    <${RequestError} fault=${fault} again=${again} />
    ${answer && html`<div class="steer-text"><h4>Corrupted</h4><p dir="auto">${inLine(answer.corrupted)}</p></div>
      <div class="steer-text"><h4>With layer ${cell.layer + 1}, position ${cell.position}: ${restoredText(value, start)}</h4><p dir="auto">${inLine(answer.text)}</p></div>`}
  </div>`;
}
