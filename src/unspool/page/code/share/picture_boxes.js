// The boxes of the page as marks of a picture: backgrounds, borders, rings, shadows inside a box.

import { fontOf, mark, placed, plainColor, round, textMark, widthOf } from "./picture_text.js";

export const touches = (box, frame) =>
  box.right >= frame.left && box.left <= frame.left + frame.width
  && box.bottom >= frame.top && box.top <= frame.top + frame.height;

export function corners(look, box) {
  const radius = parseFloat(look.borderTopLeftRadius) || 0;
  const share = look.borderTopLeftRadius.endsWith("%") ? radius / 100 * Math.min(box.width, box.height) : radius;
  return share > 0 ? { rx: round(Math.min(share, box.height / 2, box.width / 2)) } : {};
}

const SIDES = ["Top", "Right", "Bottom", "Left"];

export function drawBoxes(element, look, into, drawing) {
  const fill = plainColor(look.backgroundColor);
  const borders = SIDES.map((side) => ({
    side,
    width: look[`border${side}Style`] === "none" ? 0 : parseFloat(look[`border${side}Width`]) || 0,
    color: plainColor(look[`border${side}Color`]),
    dashed: look[`border${side}Style`] === "dashed" || look[`border${side}Style`] === "dotted",
  })).filter(({ width, color }) => width > 0 && color);
  const outline = outlineOf(look);
  const shadows = insetsOf(look);
  if (!fill && !borders.length && !outline && !shadows.length) return;
  const boxes = look.display === "inline" ? [...element.getClientRects()] : [element.getBoundingClientRect()];
  for (const box of boxes) {
    if (!box.width || !box.height || !touches(box, drawing.frame)) continue;
    if (fill) into.append(mark("rect", { ...placed(box, drawing.frame), ...corners(look, box), fill }));
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
    const at = placed(box, frame);
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
    ...placed(grown, frame), ...(rx ? { rx: round(Math.max(0, rx + out)) } : {}),
    fill: "none", stroke: color, "stroke-width": width, ...dashes(dashed, width),
  }));
}

function outlineOf(look) {
  const width = parseFloat(look.outlineWidth) || 0;
  const color = plainColor(look.outlineColor);
  if (look.outlineStyle === "none" || !width || !color) return null;
  return { width, color, dashed: look.outlineStyle === "dashed", out: (parseFloat(look.outlineOffset) || 0) + width / 2 };
}

/** Shadows inside a box, with which the page draws lines under tokens and thin rings. */
function insetsOf(look) {
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
    into.append(mark("rect", { ...placed(line, frame), fill: color }));
  }
}

/** What a style sheet put before or behind an element's own content: a mark, or a few letters. */
export function drawPseudo(element, which, look, into, { frame }) {
  const own = getComputedStyle(element, which);
  if (own.content === "none" || own.content === "normal" || own.display === "none") return;
  const box = element.getBoundingClientRect();
  const letters = own.content.match(/^"(.*)"$/)?.[1] ?? "";
  if (own.position === "absolute") {
    const inner = { left: box.left + parseFloat(look.borderLeftWidth), top: box.top + parseFloat(look.borderTopWidth) };
    const place = new DOMRect(inner.left + parseFloat(own.left), inner.top + parseFloat(own.top), parseFloat(own.width), parseFloat(own.height));
    if (touches(place, frame)) boxMarks(place, own, into, frame);
  } else if (letters.trim() && which === "::before") {
    const font = fontOf(own);
    const left = box.left + parseFloat(look.borderLeftWidth) + parseFloat(look.paddingLeft);
    const line = new DOMRect(left, box.top, widthOf(letters, font), own.verticalAlign === "super" ? box.height * 0.6 : box.height);
    if (touches(line, frame)) into.append(textMark({ text: letters.trimEnd(), box: line }, font, own, frame));
  }
}

function boxMarks(place, look, into, frame) {
  const fill = plainColor(look.backgroundColor);
  const width = parseFloat(look.borderTopWidth) || 0;
  const stroke = width > 0 && look.borderTopStyle !== "none" ? plainColor(look.borderTopColor) : null;
  const inner = new DOMRect(place.x + width / 2, place.y + width / 2, place.width - width, place.height - width);
  into.append(mark("rect", {
    ...placed(inner, frame), ...corners(look, place), fill: fill ?? "none", ...(stroke ? { stroke, "stroke-width": width } : {}),
  }));
}
