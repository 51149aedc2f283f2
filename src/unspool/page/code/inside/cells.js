// A vector as colored cells: painted once into a small picture that is then stretched.
//
// A vector has hundreds of numbers and a model dozens of layers; as shapes of their own they would be
// tens of thousands. One pixel a number is enough.

import { colorOf, numbersOf } from "../colors.js";
import { clamp } from "../lib.js";

/** Where the color is full: few numbers lie far beyond all others and would leave the rest pale. */
function full(cells) {
  const sizes = cells.map(Math.abs).sort((a, b) => a - b);
  return Math.max(1, sizes[Math.floor(sizes.length * 0.97)]);
}

/** Rows of cells as a picture (a data address), each row with its own full color. */
export function painted(rows, limits = rows.map(full)) {
  const canvas = document.createElement("canvas");
  canvas.width = rows[0].length;
  canvas.height = rows.length;
  const brush = canvas.getContext("2d");
  const image = brush.createImageData(canvas.width, canvas.height);
  const [above, below, zero] = ["--accent", "--d4", "--raised"].map((name) => numbersOf(colorOf(name)));
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

/** One vector, wrapped into a grid of so many columns. */
export function paintedGrid(cells, columns) {
  const rows = [];
  for (let at = 0; at < cells.length; at += columns) {
    const row = cells.slice(at, at + columns);
    rows.push([...row, ...Array(columns - row.length).fill(0)]);
  }
  return painted(rows, Array(rows.length).fill(full(cells)));
}

/** One cell in words. */
export function cellText({ cells, scales, every, width }, row, at) {
  const value = rounded(cells[row][at] * scales[row]);
  if (every === 1) return `number ${at + 1}: ${value}`;
  return `furthest of numbers ${at * every + 1} to ${Math.min(width, (at + 1) * every)}: ${value}`;
}

/** Three digits: 0.0312, 2.29, 157, 12,400. */
export function rounded(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  if (size < 0.0005) return value.toExponential(1).replace("-", "−");
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 4;
  return value.toFixed(digits).replace("-", "−");
}

/** With its sign, as a push. */
export const signed = (value) => (value > 0 ? `+${rounded(value)}` : rounded(value));
