// Words of the page as they stand on the screen: line by line, each with its place and font.

import { numbersOf } from "../colors.js";

const pen = document.createElement("canvas").getContext("2d");
const colors = new Map();

/** Any color of CSS as one that every program knows; null if nothing of it can be seen. */
export function plainColor(given) {
  const color = given.trim();
  if (!color || color === "none" || color === "transparent") return null;
  if (!colors.has(color)) {
    const [r, g, b, a] = numbersOf(color);
    colors.set(color, a === 0 ? null : a === 255 ? `rgb(${r},${g},${b})` : `rgba(${r},${g},${b},${round(a / 255)})`);
  }
  return colors.get(color);
}

const fonts = new Map();

/** A font, and how far its letters reach above the line they stand on. */
export function fontOf(look) {
  const css = `${look.fontStyle} ${look.fontWeight} ${look.fontSize} ${look.fontFamily}`;
  if (!fonts.has(css)) {
    pen.font = css;
    const { fontBoundingBoxAscent: above, fontBoundingBoxDescent: below } = pen.measureText("Hg");
    fonts.set(css, { css, above, below });
  }
  return fonts.get(css);
}

export function widthOf(text, font) {
  pen.font = font.css;
  return pen.measureText(text).width;
}

/** The lines into which the browser broke a text: `{text, box}`. */
export function linesOf(node, look) {
  const range = document.createRange();
  range.selectNodeContents(node);
  const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
  if (!boxes.length) return [];
  const keeps = /pre|break-spaces/.test(look.whiteSpace);
  const shown = (text) => cased(keeps ? text.replace(/[\n\r]/g, "") : text.replace(/\s+/g, " "), look);
  if (boxes.length === 1) return [{ text: shown(keeps ? node.data : trimmed(node.data, range, node)), box: boxes[0] }];
  return brokenLines(node, range).map(({ text, box }) => ({ text: shown(text), box }));
}

/** Without the spaces at either end that the browser left out. */
function trimmed(text, range, node) {
  const isSeen = (index) => {
    range.setStart(node, index);
    range.setEnd(node, index + 1);
    return range.getBoundingClientRect().width > 0;
  };
  let from = 0;
  let to = text.length;
  while (from < to && /\s/.test(text[from]) && !isSeen(from)) from += 1;
  while (to > from && /\s/.test(text[to - 1]) && !isSeen(to - 1)) to -= 1;
  return text.slice(from, to);
}

/** Letter by letter, as there is no other way to learn where a line was broken. */
function brokenLines(node, range) {
  const lines = [];
  let index = 0;
  for (const letter of node.data) {
    range.setStart(node, index);
    range.setEnd(node, index + letter.length);
    index += letter.length;
    const box = [...range.getClientRects()].find((each) => each.width > 0);
    if (!box) continue;
    const last = lines.at(-1);
    if (last && Math.abs(last.box.top - box.top) < box.height / 2) {
      last.text += letter;
      const { left, top, height } = last.box;
      last.box = new DOMRect(left, top, box.right - left, height);
    } else lines.push({ text: letter, box });
  }
  return lines;
}

function cased(text, look) {
  if (look.textTransform === "uppercase") return text.toUpperCase();
  if (look.textTransform === "lowercase") return text.toLowerCase();
  if (look.textTransform === "capitalize") return text.replace(/(^|\s)\S/g, (first) => first.toUpperCase());
  return text;
}

/** A line of text, and the line drawn under it or through it. */
export function lineMarks(line, font, look, frame) {
  const words = textMark(line, font, look, frame);
  const color = look.textDecorationLine === "none" ? null : plainColor(look.textDecorationColor);
  if (!color) return [words];
  const size = parseFloat(look.fontSize);
  const thick = parseFloat(look.textDecorationThickness) || size / 14;
  const under = (parseFloat(look.textUnderlineOffset) || size / 9) + thick / 2;
  const down = look.textDecorationLine.includes("underline") ? under : -font.above * 0.3;
  const y = round(Number(words.getAttribute("y")) + down);
  const x1 = round(line.box.left - frame.left);
  return [mark("line", { x1, x2: round(x1 + line.box.width), y1: y, y2: y, stroke: color, "stroke-width": round(thick) }), words];
}

/** One line as a <text>, as wide as it is on the screen whatever font another program has. */
export function textMark({ text, box }, font, look, frame) {
  const element = mark("text", {
    x: round(box.left - frame.left),
    y: round(box.top - frame.top + (box.height - font.above - font.below) / 2 + font.above),
    fill: plainColor(look.color) ?? "none",
    "font-family": look.fontFamily,
    "font-size": look.fontSize,
    ...(look.fontWeight === "400" ? {} : { "font-weight": look.fontWeight }),
    ...(look.fontStyle === "normal" ? {} : { "font-style": look.fontStyle }),
    ...(look.letterSpacing === "normal" ? {} : { "letter-spacing": look.letterSpacing }),
    ...([...text].length > 1 && box.width > 0 ? { textLength: round(box.width), lengthAdjust: "spacingAndGlyphs" } : {}),
  });
  element.setAttributeNS("http://www.w3.org/XML/1998/namespace", "xml:space", "preserve");
  element.textContent = writable(text);
  return element;
}

/** XML cannot carry most control characters. */
const writable = (text) => text.toWellFormed().replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");

const SVG = "http://www.w3.org/2000/svg";

export const round = (x) => Math.round(x * 100) / 100;

export function mark(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** A box of the screen in the picture's coordinates. */
export const placed = (box, frame) => ({
  x: round(box.left - frame.left), y: round(box.top - frame.top), width: round(box.width), height: round(box.height),
});
