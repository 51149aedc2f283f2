// A picture of the view as the person sees it: the page's boxes and words written as plain SVG.
//
// Every box becomes a <rect>, every line of every text a <text> at the place the browser gave it, and
// pictures of the page are taken over with their colors. So words stay words, and it can be enlarged.

import { corners, drawBoxes, drawPseudo, touches } from "./picture_boxes.js";
import { controlMarks, isDrawnByBrowser } from "./picture_controls.js";
import { fontOf, lineMarks, linesOf, mark, placed, plainColor, round } from "./picture_text.js";

/** The whole view as an <svg> of the size it has on the screen. */
export function pictureOf(root) {
  const box = root.getBoundingClientRect();
  const top = Math.max(box.top, 0); // a page that is scrolled shows less of the view
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

/** The picture as pixels, twice as fine as on the screen. */
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
  for (let each = element; each; each = each.parentElement) {
    const color = plainColor(getComputedStyle(each).backgroundColor);
    if (color) return color;
  }
  return plainColor(getComputedStyle(document.documentElement).getPropertyValue("--back")) ?? "white";
}

// -- the walk ----------------------------------------------------------------------------------

/** What is positioned lies over what is not. */
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

const LEFT_OUT = new Set(["DIALOG", "SCRIPT", "STYLE", "TEMPLATE", "OPTION", "NOSCRIPT"]);

function draw(element, into, drawing) {
  if (LEFT_OUT.has(element.tagName)) return;
  const look = getComputedStyle(element);
  if (look.display === "none" || Number(look.opacity) === 0 || isHiddenFromEyes(look)) return;
  let group = into;
  if (Number(look.opacity) < 1) group = grouped(into, { opacity: look.opacity });
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
      group = clipped(group, box, look, drawing);
    }
  }
  drawPseudo(element, "::before", look, group, drawing);
  drawChildren(element, group, drawing);
  drawPseudo(element, "::after", look, group, drawing);
}

/** Words for screen readers alone: clipped to nothing. */
const isHiddenFromEyes = (look) =>
  look.clipPath === "inset(50%)" || (look.position === "absolute" && look.width === "1px" && look.overflow === "hidden");

function grouped(into, attributes) {
  const group = mark("g", attributes);
  into.append(group);
  return group;
}

function clipped(into, box, look, drawing) {
  drawing.clips += 1;
  const clip = mark("clipPath", { id: `clip${drawing.clips}` });
  const [left, top, right, bottom] = ["Left", "Top", "Right", "Bottom"].map((side) => parseFloat(look[`border${side}Width`]) || 0);
  const inside = new DOMRect(box.left + left, box.top + top, box.width - left - right, box.height - top - bottom);
  clip.append(mark("rect", { ...placed(inside, drawing.frame), ...corners(look, inside) }));
  into.append(clip);
  return grouped(into, { "clip-path": `url(#clip${drawing.clips})` });
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

const TAKEN_OVER = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap",
  "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight", "font-style", "text-anchor",
  "dominant-baseline", "visibility", "display", "paint-order",
];
const COLORS = new Set(["fill", "stroke"]);

/** A picture of the page, with the colors that its classes gave it. */
function drawPicture(element, box, look, into, drawing) {
  if (!touches(box, drawing.frame) || !box.width || !box.height) return;
  const copy = element.cloneNode(true);
  const originals = [element, ...element.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((each, number) => {
    const style = getComputedStyle(originals[number]);
    for (const name of TAKEN_OVER) {
      const value = style.getPropertyValue(name);
      if (!value || value === "normal" || (value === "none" && !COLORS.has(name) && name !== "display")) continue;
      each.setAttribute(name, COLORS.has(name) && !value.startsWith("url(") ? plainColor(value) ?? "none" : value);
    }
    if (each !== copy && style.transform !== "none" && !each.hasAttribute("transform")) {
      each.setAttribute("transform", style.transform);
    }
    for (const name of [...each.getAttributeNames()]) {
      if (name === "class" || name === "style" || name === "tabindex" || /^(on|data-|aria-)/.test(name)) each.removeAttribute(name);
    }
  });
  const { paddingLeft, paddingTop } = look;
  const inner = {
    left: box.left + (parseFloat(paddingLeft) || 0), top: box.top + (parseFloat(paddingTop) || 0),
    width: box.width, height: box.height,
  };
  for (const [key, value] of Object.entries(placed(inner, drawing.frame))) copy.setAttribute(key, value);
  copy.setAttribute("overflow", look.overflow === "visible" ? "visible" : "hidden");
  into.append(copy);
}

function drawCanvas(element, box, look, into, drawing) {
  if (!touches(box, drawing.frame) || !element.width || !element.height) return;
  into.append(mark("image", {
    ...placed(box, drawing.frame), href: element.toDataURL("image/png"), preserveAspectRatio: "none",
    "image-rendering": look.imageRendering === "pixelated" ? "pixelated" : "auto",
  }));
}
