// Fields and sliders of the page as marks of a picture: a browser draws these itself, so their inside
// cannot be read from the page.

import { fontOf, mark, plainColor, textMark, widthOf } from "./picture_text.js";

/** Whether even the box of it is the browser's own. */
export const isDrawnByBrowser = (element, look) =>
  look.appearance !== "none" && element.matches("input[type=range], input[type=checkbox], input[type=radio]");

/** Marks for a field, without its box; null if this is no field. */
export function controlMarks(element, look, box, frame) {
  const x = box.left - frame.left;
  const y = box.top - frame.top;
  if (element.tagName === "TEXTAREA") return written(element, look, box, frame, true);
  if (element.tagName === "SELECT") {
    const line = written(element, look, box, frame, false, element.selectedOptions[0]?.text ?? "");
    const right = x + box.width - 12;
    const middle = y + box.height / 2;
    line.push(mark("path", {
      d: `M${right - 4} ${middle - 2}l4 4l4-4`, fill: "none", stroke: plainColor(look.color) ?? "none", "stroke-width": 1.5,
    }));
    return line;
  }
  if (element.tagName === "PROGRESS" || element.tagName === "METER") {
    const share = Math.max(0, element.position ?? element.value / (element.max || 1));
    return [mark("rect", { x, y, width: box.width * share, height: box.height, rx: 2, fill: accent(look) })];
  }
  if (element.tagName !== "INPUT") return null;
  if (element.type === "range") return slider(element, look, box, x, y);
  if (element.type === "checkbox" || element.type === "radio") return switchMarks(element, look, box, x, y);
  if (element.type === "file" || element.type === "hidden") return [];
  return written(element, look, box, frame, false);
}

const accent = (look) =>
  plainColor(look.accentColor === "auto" ? look.getPropertyValue("--accent") : look.accentColor) ?? "gray";
const lineColor = (look) => plainColor(look.getPropertyValue("--line")) ?? "gray";

function slider(element, look, box, x, y) {
  const low = Number(element.min || 0);
  const high = Number(element.max || 100);
  const share = high > low ? (Number(element.value) - low) / (high - low) : 0;
  const middle = y + box.height / 2;
  const at = x + 8 + share * Math.max(0, box.width - 16);
  return [
    mark("rect", { x, y: middle - 2, width: box.width, height: 4, rx: 2, fill: lineColor(look) }),
    mark("rect", { x, y: middle - 2, width: at - x, height: 4, rx: 2, fill: accent(look) }),
    mark("circle", { cx: at, cy: middle, r: 7, fill: accent(look) }),
  ];
}

function switchMarks(element, look, box, x, y) {
  if (look.appearance === "none") return []; // it is drawn by its box
  const round = element.type === "radio" ? Math.min(box.width, box.height) / 2 : 2;
  const on = element.checked;
  const found = [mark("rect", {
    x: x + 0.5, y: y + 0.5, width: box.width - 1, height: box.height - 1, rx: round,
    fill: on ? accent(look) : "none", stroke: on ? accent(look) : plainColor(look.getPropertyValue("--quiet")) ?? "gray",
  })];
  if (on) {
    const back = plainColor(look.getPropertyValue("--back")) ?? "white";
    found.push(mark("path", {
      d: `M${x + box.width * 0.25} ${y + box.height * 0.5}l${box.width * 0.2} ${box.height * 0.2}l${box.width * 0.32} ${-box.height * 0.4}`,
      fill: "none", stroke: back, "stroke-width": 1.6,
    }));
  }
  return found;
}

/** The words in a field: its value, or else what it asks for. */
function written(element, look, box, frame, wraps, given = null) {
  const value = given ?? element.value;
  const words = value || element.placeholder || "";
  if (!words || element.type === "password") return [];
  const style = value ? look : { ...picked(look), color: getComputedStyle(element, "::placeholder").color };
  const font = fontOf(look);
  const left = box.left + parseFloat(look.borderLeftWidth) + parseFloat(look.paddingLeft);
  const inside = box.width - parseFloat(look.paddingLeft) - parseFloat(look.paddingRight) - 2;
  const tall = parseFloat(look.lineHeight) || (font.above + font.below) * 1.2;
  const lines = wraps ? folded(words, inside, font) : [cut(words, inside, font)];
  const top = wraps
    ? box.top + parseFloat(look.borderTopWidth) + parseFloat(look.paddingTop) - element.scrollTop
    : box.top + (box.height - tall) / 2;
  return lines
    .map((text, number) => ({ text, box: new DOMRect(left, top + number * tall, widthOf(text, font), tall) }))
    .filter(({ text, box: line }) => text.trim() && line.top >= box.top - 1 && line.bottom <= box.bottom + tall / 2)
    .map((line) => textMark(line, font, style, frame));
}

const picked = ({ fontFamily, fontSize, fontWeight, fontStyle, letterSpacing }) =>
  ({ fontFamily, fontSize, fontWeight, fontStyle, letterSpacing, textDecorationLine: "none" });

function cut(text, width, font) {
  let shown = text;
  while (shown.length > 1 && widthOf(shown, font) > width) shown = shown.slice(0, -1);
  return shown;
}

function folded(text, width, font) {
  const lines = [];
  for (const paragraph of text.split("\n")) {
    let line = "";
    for (const word of paragraph.split(/(?<=\s)/)) {
      if (line && widthOf((line + word).trimEnd(), font) > width) {
        lines.push(line);
        line = "";
      }
      line += word;
    }
    lines.push(line);
  }
  return lines;
}
