// The current view as an SVG: every box becomes a <rect>, every line of text a <text> where the browser put it, and SVGs
// of the page are copied with their colors. So text stays text, and the picture scales.

// -- text -----------------------------------------------------------------------------------------

import { rgbaOf } from "../lib.js";

const pen = document.createElement("canvas").getContext("2d");
const colors = new Map();

/** A CSS color as rgb() or rgba(), for any SVG program; null if it is transparent. */
function plainColor(cssColor) {
  const color = cssColor.trim();
  if (!color || color === "none" || color === "transparent") return null;
  if (!colors.has(color)) {
    const [r, g, b, a] = rgbaOf(color);
    colors.set(color, a === 0 ? null : a === 255 ? `rgb(${r},${g},${b})` : `rgba(${r},${g},${b},${round(a / 255)})`);
  }
  return colors.get(color);
}

const fonts = new Map();

/** A font with its ascent and descent. */
function fontOf(look) {
  const css = `${look.fontStyle} ${look.fontWeight} ${look.fontSize} ${look.fontFamily}`;
  if (!fonts.has(css)) {
    pen.font = css;
    const { fontBoundingBoxAscent: above, fontBoundingBoxDescent: below } = pen.measureText("Hg");
    fonts.set(css, { css, above, below });
  }
  return fonts.get(css);
}

function widthOf(text, font) {
  pen.font = font.css;
  return pen.measureText(text).width;
}

/** The lines into which the browser broke a text: `{text, box}`. */
function linesOf(node, look) {
  const range = document.createRange();
  range.selectNodeContents(node);
  const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
  if (!boxes.length) return [];
  const keeps = /pre|break-spaces/.test(look.whiteSpace);
  const displayed = (text) => applyCase(keeps ? text.replace(/[\n\r]/g, "") : text.replace(/\s+/g, " "), look);
  if (boxes.length === 1) return [{ text: displayed(keeps ? node.data : trimInvisible(node.data, range, node)), box: boxes[0] }];
  return brokenLines(node, range).map(({ text, box }) => ({ text: displayed(text), box }));
}

/** Text without leading and trailing spaces that the browser did not render. */
function trimInvisible(text, range, node) {
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

/** Find line breaks character by character: the DOM has no API for them. */
function brokenLines(node, range) {
  const lines = [];
  let index = 0;
  for (const letter of node.data) {
    range.setStart(node, index);
    range.setEnd(node, index + letter.length);
    index += letter.length;
    const box = [...range.getClientRects()].find((rect) => rect.width > 0);
    if (!box) continue;
    const last = lines.at(-1);
    if (last && Math.abs(last.box.top - box.top) < box.height / 2) {
      last.text += letter;
      const { left: x, top, height } = last.box;
      last.box = new DOMRect(x, top, box.right - x, height);
    } else lines.push({ text: letter, box });
  }
  return lines;
}

function applyCase(text, look) {
  if (look.textTransform === "uppercase") return text.toUpperCase();
  if (look.textTransform === "lowercase") return text.toLowerCase();
  if (look.textTransform === "capitalize") return text.replace(/(^|\s)\S/g, (first) => first.toUpperCase());
  return text;
}

/** A line of text, with its underline or strike-through. */
function lineMarks(line, font, look, frame) {
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

/** One line as a <text> with its width on the screen, for programs with other fonts. */
function textMark({ text, box }, font, look, frame) {
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
  element.textContent = cleanText(text);
  return element;
}

/** Replace control characters, which XML does not allow. */
const cleanText = (text) => text.toWellFormed().replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");

const SVG = "http://www.w3.org/2000/svg";

const round = (x) => Math.round(x * 100) / 100;

function mark(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** A box in the picture's coordinates. */
const boxAttributes = (box, frame) => ({
  x: round(box.left - frame.left), y: round(box.top - frame.top), width: round(box.width), height: round(box.height),
});

// -- boxes: backgrounds, borders, outlines, inset shadows ----------------------------------------------

const touches = (box, frame) =>
  box.right >= frame.left && box.left <= frame.left + frame.width
  && box.bottom >= frame.top && box.top <= frame.top + frame.height;

function corners(look, box) {
  const radius = parseFloat(look.borderTopLeftRadius) || 0;
  const share = look.borderTopLeftRadius.endsWith("%") ? radius / 100 * Math.min(box.width, box.height) : radius;
  return share > 0 ? { rx: round(Math.min(share, box.height / 2, box.width / 2)) } : {};
}

const SIDES = ["Top", "Right", "Bottom", "Left"];

function drawBoxes(element, look, into, drawing) {
  const fill = plainColor(look.backgroundColor);
  const borders = SIDES.map((side) => ({
    side,
    width: look[`border${side}Style`] === "none" ? 0 : parseFloat(look[`border${side}Width`]) || 0,
    color: plainColor(look[`border${side}Color`]),
    dashed: look[`border${side}Style`] === "dashed" || look[`border${side}Style`] === "dotted",
  })).filter(({ width, color }) => width > 0 && color);
  const outline = outlineOf(look);
  const shadows = insetShadowsOf(look);
  if (!fill && !borders.length && !outline && !shadows.length) return;
  const boxes = look.display === "inline" ? [...element.getClientRects()] : [element.getBoundingClientRect()];
  for (const box of boxes) {
    if (!box.width || !box.height || !touches(box, drawing.frame)) continue;
    if (fill) into.append(mark("rect", { ...boxAttributes(box, drawing.frame), ...corners(look, box), fill }));
    for (const shadow of shadows) drawInset(shadow, box, look, into, drawing.frame);
    drawBorders(borders, box, look, into, drawing.frame);
    if (outline) drawRing(outline, box, look, into, drawing.frame);
  }
}

function drawBorders(borders, box, look, into, frame) {
  const [first] = borders;
  if (borders.length === 4 && borders.every((b) => b.width === first.width && b.color === first.color)) {
    drawRing({ width: first.width, color: first.color, dashed: first.dashed, out: -first.width / 2 }, box, look, into, frame);
    return;
  }
  for (const { side, width, color, dashed } of borders) {
    const at = boxAttributes(box, frame);
    const half = width / 2;
    const [x1, y1, x2, y2] = {
      Top: [at.x, at.y + half, at.x + at.width, at.y + half],
      Bottom: [at.x, at.y + at.height - half, at.x + at.width, at.y + at.height - half],
      Left: [at.x + half, at.y, at.x + half, at.y + at.height],
      Right: [at.x + at.width - half, at.y, at.x + at.width - half, at.y + at.height],
    }[side];
    into.append(mark("line", { x1, y1, x2, y2, stroke: color, "stroke-width": width, ...dashes(dashed, width) }));
  }
}

const dashes = (dashed, width) => (dashed ? { "stroke-dasharray": `${width} ${width}` } : {});

function drawRing({ width, color, dashed, out }, box, look, into, frame) {
  const grown = {
    left: box.left - out, top: box.top - out, width: box.width + 2 * out, height: box.height + 2 * out,
  };
  const { rx = 0 } = corners(look, box);
  into.append(mark("rect", {
    ...boxAttributes(grown, frame), ...(rx ? { rx: round(Math.max(0, rx + out)) } : {}),
    fill: "none", stroke: color, "stroke-width": width, ...dashes(dashed, width),
  }));
}

function outlineOf(look) {
  const width = parseFloat(look.outlineWidth) || 0;
  const color = plainColor(look.outlineColor);
  if (look.outlineStyle === "none" || !width || !color) return null;
  return { width, color, dashed: look.outlineStyle === "dashed", out: (parseFloat(look.outlineOffset) || 0) + width / 2 };
}

/** Inset shadows, which the page uses for lines under tokens and thin rings. */
function insetShadowsOf(look) {
  if (!look.boxShadow.includes("inset")) return [];
  return look.boxShadow.split(/,(?![^(]*\))/).filter((shadow) => shadow.includes("inset")).map((shadow) => {
    const [, down, , spread] = shadow.match(/-?[\d.]+px/g).map(parseFloat);
    return { color: plainColor(shadow.trim().replace(/\s-?[\d.]+px.*$/, "")), down, spread };
  }).filter(({ color }) => color);
}

function drawInset({ color, down, spread }, box, look, into, frame) {
  if (spread > 0) drawRing({ width: spread, color, dashed: false, out: -spread / 2 }, box, look, into, frame);
  if (down < 0) {
    const line = new DOMRect(box.left, box.bottom + down, box.width, -down);
    into.append(mark("rect", { ...boxAttributes(line, frame), fill: color }));
  }
}

/** A ::before or ::after element: a box, or a few letters. */
function drawPseudo(element, which, look, into, { frame }) {
  const style = getComputedStyle(element, which);
  if (style.content === "none" || style.content === "normal" || style.display === "none") return;
  const box = element.getBoundingClientRect();
  const letters = style.content.match(/^"(.*)"$/)?.[1] ?? "";
  if (style.position === "absolute") {
    const inner = { left: box.left + parseFloat(look.borderLeftWidth), top: box.top + parseFloat(look.borderTopWidth) };
    const place = new DOMRect(inner.left + parseFloat(style.left), inner.top + parseFloat(style.top), parseFloat(style.width), parseFloat(style.height));
    if (touches(place, frame)) boxMarks(place, style, into, frame);
  } else if (letters.trim() && which === "::before") {
    const font = fontOf(style);
    const x = box.left + parseFloat(look.borderLeftWidth) + parseFloat(look.paddingLeft);
    const line = new DOMRect(x, box.top, widthOf(letters, font), style.verticalAlign === "super" ? box.height * 0.6 : box.height);
    if (touches(line, frame)) into.append(textMark({ text: letters.trimEnd(), box: line }, font, style, frame));
  }
}

function boxMarks(place, look, into, frame) {
  const fill = plainColor(look.backgroundColor);
  const width = parseFloat(look.borderTopWidth) || 0;
  const stroke = width > 0 && look.borderTopStyle !== "none" ? plainColor(look.borderTopColor) : null;
  const inner = new DOMRect(place.x + width / 2, place.y + width / 2, place.width - width, place.height - width);
  into.append(mark("rect", {
    ...boxAttributes(inner, frame), ...corners(look, place), fill: fill ?? "none", ...(stroke ? { stroke, "stroke-width": width } : {}),
  }));
}

// -- form controls: drawn by the browser, so their content is not in the DOM ---------------------------

/** Whether the browser draws the box of a control too. */
const isDrawnByBrowser = (element, look) =>
  look.appearance !== "none" && element.matches("input[type=range], input[type=checkbox], input[type=radio]");

/** Shapes for a form control, without its box; null if the element is none. */
function controlMarks(element, look, box, frame) {
  const x = box.left - frame.left;
  const y = box.top - frame.top;
  if (element.tagName === "TEXTAREA") return fieldText(element, look, box, frame, true);
  if (element.tagName === "SELECT") {
    const line = fieldText(element, look, box, frame, false, element.selectedOptions[0]?.text ?? "");
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
  return fieldText(element, look, box, frame, false);
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
  if (look.appearance === "none") return []; // drawn as its box
  const round = element.type === "radio" ? Math.min(box.width, box.height) / 2 : 2;
  const on = element.checked;
  const marks = [mark("rect", {
    x: x + 0.5, y: y + 0.5, width: box.width - 1, height: box.height - 1, rx: round,
    fill: on ? accent(look) : "none", stroke: on ? accent(look) : plainColor(look.getPropertyValue("--quiet")) ?? "gray",
  })];
  if (on) {
    const back = plainColor(look.getPropertyValue("--back")) ?? "white";
    marks.push(mark("path", {
      d: `M${x + box.width * 0.25} ${y + box.height * 0.5}l${box.width * 0.2} ${box.height * 0.2}l${box.width * 0.32} ${-box.height * 0.4}`,
      fill: "none", stroke: back, "stroke-width": 1.6,
    }));
  }
  return marks;
}

/** The text of a field: its value, or else its placeholder. */
function fieldText(element, look, box, frame, wraps, text = null) {
  const value = text ?? element.value;
  const words = value || element.placeholder || "";
  if (!words || element.type === "password") return [];
  const style = value ? look : { ...fontProperties(look), color: getComputedStyle(element, "::placeholder").color };
  const font = fontOf(look);
  const x = box.left + parseFloat(look.borderLeftWidth) + parseFloat(look.paddingLeft);
  const inside = box.width - parseFloat(look.paddingLeft) - parseFloat(look.paddingRight) - 2;
  const tall = parseFloat(look.lineHeight) || (font.above + font.below) * 1.2;
  const lines = wraps ? wrapText(words, inside, font) : [truncate(words, inside, font)];
  const top = wraps
    ? box.top + parseFloat(look.borderTopWidth) + parseFloat(look.paddingTop) - element.scrollTop
    : box.top + (box.height - tall) / 2;
  return lines
    .map((text, number) => ({ text, box: new DOMRect(x, top + number * tall, widthOf(text, font), tall) }))
    .filter(({ text, box: line }) => text.trim() && line.top >= box.top - 1 && line.bottom <= box.bottom + tall / 2)
    .map((line) => textMark(line, font, style, frame));
}

const fontProperties = ({ fontFamily, fontSize, fontWeight, fontStyle, letterSpacing }) =>
  ({ fontFamily, fontSize, fontWeight, fontStyle, letterSpacing, textDecorationLine: "none" });

function truncate(text, width, font) {
  let visible = text;
  while (visible.length > 1 && widthOf(visible, font) > width) visible = visible.slice(0, -1);
  return visible;
}

function wrapText(text, width, font) {
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

// -- the picture ------------------------------------------------------------------------------------

/** The view as an <svg> of its size on the screen. */
export function pictureOf(root) {
  const box = root.getBoundingClientRect();
  const top = Math.max(box.top, 0); // only the part that is scrolled into view
  const frame = { left: box.left, top, width: box.width, height: Math.max(1, Math.min(box.bottom, innerHeight) - top) };
  const svg = mark("svg", {
    width: round(frame.width), height: round(frame.height),
    viewBox: `0 0 ${round(frame.width)} ${round(frame.height)}`, role: "img",
  });
  const title = mark("title", {});
  title.textContent = document.title;
  svg.append(title, mark("rect", { width: "100%", height: "100%", fill: backgroundBehind(root) }));
  const drawing = { frame, svg, clips: 0 };
  drawChildren(root, svg, drawing);
  return svg;
}

export const svgText = (svg) => `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(svg)}\n`;

/** The picture as a PNG, at twice the resolution of the screen. */
export async function pixels(svg, scale = 2) {
  const image = new Image();
  const url = URL.createObjectURL(new Blob([svgText(svg)], { type: "image/svg+xml" }));
  try {
    await new Promise((done, failed) => {
      image.onload = done;
      image.onerror = () => failed(new Error("The browser could not draw the picture."));
      image.src = url;
    });
    const canvas = document.createElement("canvas");
    canvas.width = Math.ceil(Number(svg.getAttribute("width")) * scale);
    canvas.height = Math.ceil(Number(svg.getAttribute("height")) * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.drawImage(image, 0, 0);
    return await new Promise((done) => { canvas.toBlob(done, "image/png"); });
  } finally {
    URL.revokeObjectURL(url);
  }
}

function backgroundBehind(element) {
  for (let ancestor = element; ancestor; ancestor = ancestor.parentElement) {
    const color = plainColor(getComputedStyle(ancestor).backgroundColor);
    if (color) return color;
  }
  return plainColor(getComputedStyle(document.documentElement).getPropertyValue("--back")) ?? "white";
}

// -- the walk ----------------------------------------------------------------------------------

/** Draw positioned elements after the others, as browsers do. */
function drawChildren(parent, into, drawing) {
  const above = [];
  for (const node of parent.childNodes) {
    if (node.nodeType === Node.TEXT_NODE) drawText(node, parent, into, drawing);
    else if (node.nodeType !== Node.ELEMENT_NODE) continue;
    else if (getComputedStyle(node).position === "static") draw(node, into, drawing);
    else above.push(node);
  }
  const height = (node) => parseInt(getComputedStyle(node).zIndex, 10) || 0;
  above.sort((a, b) => height(a) - height(b)).forEach((node) => draw(node, into, drawing));
}

const SKIPPED_TAGS = new Set(["DIALOG", "SCRIPT", "STYLE", "TEMPLATE", "OPTION", "NOSCRIPT"]);

function draw(element, into, drawing) {
  if (SKIPPED_TAGS.has(element.tagName)) return;
  const look = getComputedStyle(element);
  if (look.display === "none" || Number(look.opacity) === 0 || isHiddenFromEyes(look)) return;
  let group = into;
  if (Number(look.opacity) < 1) group = appendGroup(into, { opacity: look.opacity });
  if (look.display !== "contents") {
    const box = element.getBoundingClientRect();
    if (look.overflow === "visible" && !element.firstChild && !touches(box, drawing.frame)) return;
    if (look.visibility === "visible" && !isDrawnByBrowser(element, look)) drawBoxes(element, look, group, drawing);
    if (element instanceof SVGElement) return drawPicture(element, box, look, group, drawing);
    if (element.tagName === "CANVAS") return drawCanvas(element, box, look, group, drawing);
    const marks = controlMarks(element, look, box, drawing.frame);
    if (marks) return void group.append(...marks);
    if (look.overflowX !== "visible" || look.overflowY !== "visible") {
      if (!touches(box, drawing.frame)) return;
      group = appendClip(group, box, look, drawing);
    }
  }
  drawPseudo(element, "::before", look, group, drawing);
  drawChildren(element, group, drawing);
  drawPseudo(element, "::after", look, group, drawing);
}

/** Whether an element is only for screen readers. */
const isHiddenFromEyes = (look) =>
  look.clipPath === "inset(50%)" || (look.position === "absolute" && look.width === "1px" && look.overflow === "hidden");

function appendGroup(into, attributes) {
  const group = mark("g", attributes);
  into.append(group);
  return group;
}

function appendClip(into, box, look, drawing) {
  drawing.clips += 1;
  const clip = mark("clipPath", { id: `clip${drawing.clips}` });
  const [leftWidth, top, right, bottom] = ["Left", "Top", "Right", "Bottom"].map((side) => parseFloat(look[`border${side}Width`]) || 0);
  const inside = new DOMRect(box.left + leftWidth, box.top + top, box.width - leftWidth - right, box.height - top - bottom);
  clip.append(mark("rect", { ...boxAttributes(inside, drawing.frame), ...corners(look, inside) }));
  into.append(clip);
  return appendGroup(into, { "clip-path": `url(#clip${drawing.clips})` });
}

// -- words and pictures -------------------------------------------------------------------------

function drawText(node, parent, into, drawing) {
  if (!node.data.trim() && !node.data.includes("\u00a0")) return;
  const look = getComputedStyle(parent);
  if (look.visibility !== "visible" || parseFloat(look.fontSize) === 0) return;
  const font = fontOf(look);
  for (const line of linesOf(node, look)) {
    if (touches(line.box, drawing.frame)) into.append(...lineMarks(line, font, look, drawing.frame));
  }
}

const COPIED_STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap",
  "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight", "font-style", "text-anchor",
  "dominant-baseline", "visibility", "display", "paint-order",
];
const COLORS = new Set(["fill", "stroke"]);

/** Copy an SVG of the page with its computed colors. */
function drawPicture(element, box, look, into, drawing) {
  if (!touches(box, drawing.frame) || !box.width || !box.height) return;
  const copy = element.cloneNode(true);
  const originals = [element, ...element.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((target, number) => {
    const style = getComputedStyle(originals[number]);
    for (const name of COPIED_STYLES) {
      const value = style.getPropertyValue(name);
      if (!value || value === "normal" || (value === "none" && !COLORS.has(name) && name !== "display")) continue;
      target.setAttribute(name, COLORS.has(name) && !value.startsWith("url(") ? plainColor(value) ?? "none" : value);
    }
    if (target !== copy && style.transform !== "none" && !target.hasAttribute("transform")) {
      target.setAttribute("transform", style.transform);
    }
    for (const name of [...target.getAttributeNames()]) {
      if (name === "class" || name === "style" || name === "tabindex" || /^(on|data-|aria-)/.test(name)) target.removeAttribute(name);
    }
  });
  const { paddingLeft, paddingTop } = look;
  const inner = {
    left: box.left + (parseFloat(paddingLeft) || 0), top: box.top + (parseFloat(paddingTop) || 0),
    width: box.width, height: box.height,
  };
  for (const [key, value] of Object.entries(boxAttributes(inner, drawing.frame))) copy.setAttribute(key, value);
  copy.setAttribute("overflow", look.overflow === "visible" ? "visible" : "hidden");
  into.append(copy);
}

function drawCanvas(element, box, look, into, drawing) {
  if (!touches(box, drawing.frame) || !element.width || !element.height) return;
  into.append(mark("image", {
    ...boxAttributes(box, drawing.frame), href: element.toDataURL("image/png"), preserveAspectRatio: "none",
    "image-rendering": look.imageRendering === "pixelated" ? "pixelated" : "auto",
  }));
}
