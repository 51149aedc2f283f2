// A chart of something that every token has: the one all parts of the costs use.
//
//     <${Chart} name="Time per token" gist="…" lines=${[{name: "with the cache", color: "--d1"}]}
//       read=${() => ({first: position of the first token, series: [values]})} format=${duration} />
//
// A line without a name is drawn, but not told of. `read` is asked only when there is something to
// draw: at most once a frame, and only while the chart can be seen. The hand over the picture is a
// slider: pointer and arrow keys point at a token, here and in the text; a click or Enter selects it.

import { clamp, html, spelled, useLayoutEffect, useRef } from "../lib.js";
import { select } from "../actions.js";
import { colorOf, onColors } from "../colors.js";
import { branchNow, changed, on, state, tokenAt } from "../state.js";
import { axes, curve, layout, pointed, range } from "./paint.js";

const AT_ONCE = ["hover", "selection"];
const SOON = ["steps", "current", "costs"];
const SOON_WAIT = 50; // milliseconds: a curve that grows by a hair need not be drawn in every frame
const KEYS = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10,
  Home: -Infinity, End: Infinity };

export function Chart({ name, gist, lines, read, format, axis = format, tall = false }) {
  const box = useRef();
  const drawing = useRef();
  drawing.current ??= new Drawing();
  Object.assign(drawing.current, { name, lines, read, format, axis });
  useLayoutEffect(() => drawing.current.begin(box.current), []);
  useLayoutEffect(() => drawing.current.ask());
  return html`<figure class="chart ${tall ? "tall" : ""}" ref=${box}>
    <div class="chart-picture">
      <canvas role="img" aria-label=${gist}></canvas>
      <div class="chart-hand" role="slider" tabindex="0" aria-label="${name}: token"
        aria-valuemin="1" aria-valuenow="1" aria-valuetext=""></div>
    </div>
    <figcaption class="small">
      ${lines.filter(({ name }) => name).map((line) => html`<span class="chart-key" key=${line.name}>
        <svg viewBox="0 0 14 4" width="14" height="4" aria-hidden="true"><line x1="0" y1="2" x2="14" y2="2"
          stroke="var(${line.color})" stroke-width=${line.width ?? 2} stroke-dasharray=${(line.dash ?? []).join(" ")}/></svg>
        ${line.name} <b aria-hidden="true"></b></span>`)}
      <span class="chart-token quiet" aria-hidden="true"></span>
    </figcaption>
  </figure>`;
}

/** The picture behind one Chart: when to draw, what is pointed at. */
class Drawing {
  frame = 0;
  timer = 0;
  seen = false;
  size = { width: 0, height: 0 };
  place = null;
  plot = null;

  begin(box) {
    this.canvas = box.querySelector("canvas");
    this.hand = box.querySelector(".chart-hand");
    this.values = box.getElementsByTagName("b");
    this.token = box.querySelector(".chart-token");
    this.font = `11px ${getComputedStyle(box).fontFamily}`;
    const ask = () => this.ask();
    // Sizes are told, not asked for: asking would lay out the whole text anew in every frame.
    const size = new ResizeObserver(([entry]) => {
      this.size = entry.contentRect;
      this.ask();
    });
    size.observe(this.canvas);
    const sight = new IntersectionObserver(([entry]) => {
      this.seen = entry.isIntersecting;
      this.ask();
    });
    sight.observe(box);
    const soon = () => {
      this.timer ||= setTimeout(() => {
        this.timer = 0;
        this.ask();
      }, SOON_WAIT);
    };
    const leave = [
      onColors(ask), ...AT_ONCE.map((topic) => on(topic, ask)), ...SOON.map((topic) => on(topic, soon)),
    ];
    this.listen();
    return () => {
      cancelAnimationFrame(this.frame);
      clearTimeout(this.timer);
      size.disconnect();
      sight.disconnect();
      leave.forEach((stop) => stop());
    };
  }

  ask() {
    if (this.frame || !this.seen) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    const { canvas } = this;
    const { width, height } = this.size;
    if (!width || !this.look()) return;
    const { series, high } = this.plot;
    const sharp = devicePixelRatio || 1;
    const pixels = [Math.round(width * sharp), Math.round(height * sharp)];
    if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
    const pen = canvas.getContext("2d");
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen.clearRect(0, 0, width, height);
    const colors = this.colors();
    const place = (this.place = layout(width, height, this.plot));
    axes(pen, place, this.plot, colors);
    series.forEach((values, k) => {
      curve(pen, place, values, high, { ...this.lines[k], color: colors.lines[k] });
    });
    const chosen = this.indexOf(state.selected), under = this.indexOf(state.hovered);
    if (chosen !== null) pointed(pen, place, chosen, series, colors, colors.accent);
    if (under !== null) pointed(pen, place, under, series, colors, colors.quiet);
    this.say(under ?? chosen);
  }

  /** Take in what there is to draw; false if there is nothing. */
  look() {
    const found = this.read();
    if (!found) return false;
    const count = Math.max(0, ...found.series.map((values) => values.length));
    this.plot = { ...found, ...range(found.series, found), count, format: this.axis };
    return count > 0;
  }

  colors() {
    return {
      quiet: colorOf("--quiet"), line: colorOf("--line"), accent: colorOf("--accent"),
      lines: this.lines.map((line) => colorOf(line.color)), font: this.font,
    };
  }

  indexOf(position) {
    if (position === null || !this.plot) return null;
    const index = position - this.plot.first;
    return index >= 0 && index < this.plot.count ? index : null;
  }

  /** The values at the token that is pointed at, beside the names of the lines. */
  say(index) {
    const { series, first, count } = this.plot;
    const named = this.lines.map(({ name }, k) => ({ name, value: series[k]?.[index] })).filter(({ name }) => name);
    const said = named.map(({ value }) => (value === undefined || Number.isNaN(value) ? "" : this.format(value)));
    said.forEach((text, k) => put(this.values[k], text));
    const token = index === null ? null : tokenAt(branchNow(), first + index);
    const words = token ? `token ${index + 1}: ${spelled(token.text)}` : "";
    put(this.token, words);
    const spoken = named.map(({ name }, k) => said[k] && `${name} ${said[k]}`).filter(Boolean);
    attribute(this.hand, "aria-valuemax", Math.max(1, count));
    attribute(this.hand, "aria-valuenow", index === null ? Math.max(1, count) : index + 1);
    attribute(this.hand, "aria-valuetext", words ? `${words}, ${spoken.join(", ")}` : "no token");
  }

  // -- the hand ---------------------------------------------------------------------------------

  listen() {
    const { hand } = this;
    const under = (event) => this.place?.index(event.clientX - hand.getBoundingClientRect().left);
    hand.addEventListener("pointermove", (event) => this.point(under(event)));
    hand.addEventListener("pointerleave", () => this.point(null));
    hand.addEventListener("click", (event) => this.take(under(event)));
    hand.addEventListener("blur", () => this.point(null));
    hand.addEventListener("keydown", (event) => {
      if (!this.look()) return;
      const last = this.plot.count - 1;
      const at = this.indexOf(state.hovered) ?? this.indexOf(state.selected) ?? last;
      if (event.key in KEYS) this.point(clamp(at + KEYS[event.key], 0, last));
      else if (event.key === "Enter" || event.key === " ") this.take(at);
      else return;
      event.preventDefault();
      event.stopPropagation(); // the text has arrow keys of its own
    });
  }

  point(index) {
    const position = index === null || !this.plot?.count ? null : this.plot.first + index;
    if (state.hovered === position) return;
    state.hovered = position;
    changed("hover");
  }

  take(index) {
    if (index !== null && this.plot?.count) select(this.plot.first + index);
  }
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function attribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}
