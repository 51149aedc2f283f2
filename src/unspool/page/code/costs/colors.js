// Colors of the theme as a canvas can use them, read once and again when the theme changes.

let found = new Map();
const waiting = new Set();

function forget() {
  found = new Map();
  for (const listener of waiting) listener();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);
new MutationObserver(forget).observe(document.documentElement, {
  attributes: true, attributeFilter: ["data-theme", "class"],
});

/** Call `listener` when colors have changed; gives the function that ends it. */
export function onColors(listener) {
  waiting.add(listener);
  return () => waiting.delete(listener);
}

/** The color that a variable of base.css has now. A canvas cannot read `light-dark()` itself. */
export function colorOf(element, name) {
  if (!found.has(name)) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    element.append(probe);
    found.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return found.get(name);
}
