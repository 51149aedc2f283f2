// The elements of a picture.

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
