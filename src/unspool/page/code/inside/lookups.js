// Shared by the sections of the Inside panel: view options, inspection requests, and vectors as colored cells.

import { api } from "../api.js";
import { clamp, colorOf, html, RequestError, rgbaOf, useChanges, useRequest } from "../lib.js";
import { changed, promptLength, state, textLength, tokenAt } from "../state.js";

export const options = {
  layer: null, // from 1; null: all, averaged
  head: null, // from 1; null: all of the layer, averaged
  withoutFirst: true, // leave the first token (the attention sink) out and rescale the rest
  shade: "weight", // of the head map: "weight" | "entropy"
  written: "picked", // side of a generated token: "picked" (as output) | "read" (as input)
  prompt: "read", // the same for a prompt token
  lens: "logit", // the name of a lens, or "compare"
  against: "runner", // attribution: "runner" | "mean" | "none"
  open: { way: false, attention: true, states: true, lens: false, pushes: false, neighbours: false, steer: false, patching: false },
};

export function setOptions(what) {
  Object.assign(options, what);
  changed("inside");
}

/** Select a layer, or deselect it. */
export function toggleLayer(layer) {
  setOptions({ layer: layer === options.layer ? null : layer, head: null });
}

/** The selected layer and head, if this model has them. */
export function selectedIn({ layers, heads }) {
  const layer = options.layer !== null && options.layer <= layers ? options.layer : null;
  const head = layer !== null && options.head !== null && options.head <= heads ? options.head : null;
  return { layer, head };
}

// -- inspections of the model at one position: requested once, then cached ----------------------------

const MAX_CACHED = 80;
const answers = new Map(); // oldest first

/** A position in a branch, with a key that changes when the text before it does. */
export function placeInText(branch, at) {
  let mark = 0;
  // One beyond: the sampled token is part of the answer.
  for (let position = 0; position <= at + 1; position++) {
    mark = (Math.imul(mark, 31) + (tokenAt(branch, position)?.id ?? -1)) | 0;
  }
  return { branch: branch.id, at, key: `${branch.id} ${at} ${mark}` };
}

/** The two positions to inspect for a token: where it was sampled, and where it is the input. */
export function sidesOf(branch, selected) {
  const token = selected === null ? null : tokenAt(branch, selected);
  if (!token || selected >= textLength(branch)) return null;
  return { token, written: selected >= promptLength(branch), picked: selected - 1, read: selected };
}

/** Request an inspection; until it arrives, the last one of this branch is shown. */
export function useInspection(place, query) {
  useChanges("server"); // retry when the server is back
  const key = place && query !== null ? `${place.key} ${query}` : null;
  const ask = key === null ? null : async (signal) => {
    if (!answers.has(key)) {
      answers.set(key, await api.get(`/v1/tree/${place.branch}/look?at=${place.at}&${query}`, { signal }));
      if (answers.size > MAX_CACHED) answers.delete(answers.keys().next().value);
    }
    return { answer: answers.get(key), branch: place.branch };
  };
  const { answer: cached, fault, again } = useRequest(ask, 0, [key, state.server.ready]);
  const last = cached?.branch === place?.branch ? cached.answer : null;
  return { answer: fault ? null : answers.get(key) ?? last, fault, again };
}

/** Placeholder of a section without data: an error, or loading. */
export const Pending = ({ fault, again }) => (fault ? html`<${RequestError} fault=${fault} again=${again} />`
  : html`<p class="quiet small" role="status">Loading …</p>`);

// -- vectors as colored cells: one pixel a value in a small image that is stretched; SVG shapes would be too many --

/** The value of the full color: the 97th percentile, so that outliers do not make the others pale. */
function colorLimit(cells) {
  const sizes = cells.map(Math.abs).sort((a, b) => a - b);
  return Math.max(1, sizes[Math.floor(sizes.length * 0.97)]);
}

/** Rows of cells as an image (a data URL), each row with its own color limit. */
export function paintRows(rows, limits = rows.map(colorLimit)) {
  const canvas = document.createElement("canvas");
  canvas.width = rows[0].length;
  canvas.height = rows.length;
  const brush = canvas.getContext("2d");
  const image = brush.createImageData(canvas.width, canvas.height);
  const [above, below, zero] = ["--accent", "--d4", "--raised"].map((name) => rgbaOf(colorOf(name)));
  rows.forEach((row, y) => {
    row.forEach((cell, x) => {
      const strength = clamp(Math.abs(cell) / limits[y], 0, 1) ** 0.8;
      const color = cell < 0 ? below : above;
      const at = (y * canvas.width + x) * 4;
      for (let c = 0; c < 3; c++) image.data[at + c] = zero[c] + (color[c] - zero[c]) * strength;
      image.data[at + 3] = 255;
    });
  });
  brush.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

/** One vector, wrapped into a grid. */
export function paintGrid(cells, columns) {
  const rows = [];
  for (let at = 0; at < cells.length; at += columns) {
    const row = cells.slice(at, at + columns);
    rows.push([...row, ...Array(columns - row.length).fill(0)]);
  }
  return paintRows(rows, Array(rows.length).fill(colorLimit(cells)));
}

/** The value of one cell as text. */
export function cellText({ cells, scales, every, width }, row, at) {
  const value = formatNumber(cells[row][at] * scales[row]);
  if (every === 1) return `dimension ${at + 1}: ${value}`;
  return `largest of dimensions ${at * every + 1} to ${Math.min(width, (at + 1) * every)}: ${value}`;
}

/** Three significant digits: 0.0312, 2.29, 157, 12,400. */
export function formatNumber(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  if (size < 0.0005) return value.toExponential(1).replace("-", "−");
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 4;
  return value.toFixed(digits).replace("-", "−");
}

/** With a plus sign if positive. */
export const formatSigned = (value) => (value > 0 ? `+${formatNumber(value)}` : formatNumber(value));
