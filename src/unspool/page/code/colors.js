// Colors of the theme as numbers and as a canvas can use them: neither can read `light-dark()` itself.

import { useEffect, useState } from "./lib.js";

const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const waiting = new Set();
let found = new Map();

function turned() {
  found = new Map();
  for (const listener of waiting) listener();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", turned);
new MutationObserver(turned).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });

/** Call `listener` when light became dark, or dark light; gives the function that ends it. */
export function onColors(listener) {
  waiting.add(listener);
  return () => waiting.delete(listener);
}

/** A number that is another one after each such turn. */
export function useTheme() {
  const [turns, setTurns] = useState(0);
  useEffect(() => onColors(() => setTurns((turns) => turns + 1)), []);
  return turns;
}

/** Any color of CSS as `[red, green, blue, alpha]`, each up to 255. */
export function numbersOf(color) {
  pen.clearRect(0, 0, 1, 1);
  pen.fillStyle = color;
  pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
}

/** The color that a variable of base.css has now. */
export function colorOf(name) {
  if (!found.has(name)) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    found.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return found.get(name);
}
