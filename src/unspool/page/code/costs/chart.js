// Charts of a value per token, drawn on a canvas: scales, ticks, curves, and the Chart component.

import { selectToken } from "../actions.js";
import { clamp, colorOf, html, onThemeChange, useLayoutEffect, useRef, visibleText } from "../lib.js";
import { changed, currentBranch, on, state, tokenAt } from "../state.js";

/** About `count` round numbers that span the range. */
export function ticks(low, high, count = 3) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= raw * 0.999);
  const values = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) values.push(k * step);
  return values;
}

/** Scales for `count` tokens side by side. At least 24 slots, so that the first tokens do not fill the width. */
function chartLayout(width, height, { count, low, high }) {
  const leftEdge = 46, right = 6, top = 7, bottom = 18; // px, for the axis labels
  const slots = Math.max(count, 24);
  const across = width - leftEdge - right;
  const down = height - top - bottom;
  return {
    left: leftEdge, top, across, down, slots, count,
    x: (index) => leftEdge + ((index + 0.5) / slots) * across,
    y: (value) => top + (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low)) * down,
    /** Index of the token at an x position. */
    index: (x) => Math.min(count - 1, Math.max(0, Math.floor(((x - leftEdge) / across) * slots))),
  };
}

/** The value range: all values and at least these bounds; with `clip` just the bounds. */
function valueRange(series, { low = 0, high = 0, clip = false }) {
  for (const values of clip ? [] : series) {
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return { low, high: high > low ? high : low + 1 };
}

const numbers = new Intl.NumberFormat("en-US"); // created once: toLocaleString would create one per call

function drawAxes(pen, place, plot, colors) {
  pen.font = colors.font;
  pen.fillStyle = colors.quiet;
  pen.strokeStyle = colors.line;
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const value of ticks(plot.low, plot.high, 3)) {
    const y = Math.round(place.y(value)) + 0.5;
    drawLine(pen, place.left, y, place.left + place.across, y);
    pen.fillText(plot.format(value), place.left - 6, y);
  }
  pen.textBaseline = "alphabetic";
  const under = place.top + place.down + 14;
  for (const number of ticks(1, place.slots, 4)) {
    if (number < 1) continue;
    const x = place.x(number - 1);
    pen.textAlign = x > place.left + place.across - 12 ? "right" : "center";
    pen.fillText(numbers.format(number), x, under);
  }
}

function drawLine(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

/** Draw a curve; of tokens in the same pixel column only the lowest and highest. */
function drawCurve(pen, place, values, high, { color, width = 1.5, dash = [], shade = false }) {
  pen.strokeStyle = pen.fillStyle = color;
  pen.lineWidth = width;
  pen.lineJoin = "round";
  pen.setLineDash(dash);
  const path = new Path2D();
  const over = []; // columns with a value above the range
  let column = null, low = 0, top = 0, last = 0, isStarted = false, begin = 0;
  const flush = () => {
    if (column === null) return;
    if (!isStarted) path.moveTo((begin = column), place.y(low));
    path.lineTo(column, place.y(low));
    if (top !== low) path.lineTo(column, place.y(top));
    if (last !== top) path.lineTo(column, place.y(last));
    if (top > high) over.push(column);
    isStarted = true;
  };
  const end = () => {
    flush();
    if (isStarted && shade) fillBelow(pen, place, path, begin, column);
    column = null;
    isStarted = false;
  };
  const wide = place.slots < place.across; // one pixel column per token or more
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (!(value === value)) {
      end();
      continue;
    }
    const x = wide ? place.x(i) : Math.floor(place.x(i));
    if (x === column) {
      low = Math.min(low, value);
      top = Math.max(top, value);
      last = value;
    } else {
      flush();
      column = x;
      low = top = last = value;
    }
  }
  end();
  pen.stroke(path);
  pen.setLineDash([]);
  for (const x of over) drawArrow(pen, x, place.top);
}

function fillBelow(pen, place, path, from, to) {
  const area = new Path2D(path);
  area.lineTo(to, place.y(0));
  area.lineTo(from, place.y(0));
  pen.globalAlpha = 0.14;
  pen.fill(area);
  pen.globalAlpha = 1;
}

function drawArrow(pen, x, y) {
  pen.beginPath();
  pen.moveTo(x, y - 5);
  pen.lineTo(x + 3.5, y);
  pen.lineTo(x - 3.5, y);
  pen.fill();
}

/** Mark one token: a vertical line, and a dot on every curve. */
function drawPointer(pen, place, index, series, colors, color) {
  const x = place.x(index);
  pen.strokeStyle = color;
  pen.lineWidth = 1;
  drawLine(pen, x, place.top, x, place.top + place.down);
  series.forEach((values, k) => {
    const value = values[index];
    if (!(value === value) || value === undefined) return;
    pen.beginPath();
    pen.arc(x, place.y(value), 3, 0, 7);
    pen.fillStyle = colors.lines[k];
    pen.fill();
  });
}

// -- the component ------------------------------------------------------------------------------
//
//     <${Chart} name="Time per token" gist="…" lines=${[{name: "with the cache", color: "--d1"}]}
//       read=${() => ({first: position of the first token, series: [values]})} format=${duration} />
//
// A line without a name is not in the legend. `read` is called at most once a frame, and only while the chart is
// visible. The slider over the chart: pointer and arrow keys point at a token, here and in the text; a click or Enter
// selects it.

const IMMEDIATE = ["hover", "selection"];
const THROTTLED = ["steps", "current", "costs"];
const THROTTLE_MS = 50; // for curves that grow while a text streams
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

/** The drawing of one Chart: when to draw, and the token that is pointed at. */
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
    // Sizes come from an observer: reading them would force a layout of the whole text in every frame.
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
      }, THROTTLE_MS);
    };
    const leave = [
      onThemeChange(ask), ...IMMEDIATE.map((topic) => on(topic, ask)), ...THROTTLED.map((topic) => on(topic, soon)),
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
    const place = (this.place = chartLayout(width, height, this.plot));
    drawAxes(pen, place, this.plot, colors);
    series.forEach((values, k) => {
      drawCurve(pen, place, values, high, { ...this.lines[k], color: colors.lines[k] });
    });
    const selected = this.indexOf(state.selected), under = this.indexOf(state.hovered);
    if (selected !== null) drawPointer(pen, place, selected, series, colors, colors.accent);
    if (under !== null) drawPointer(pen, place, under, series, colors, colors.quiet);
    this.say(under ?? selected);
  }

  /** Read the data; false if there is nothing to draw. */
  look() {
    const data = this.read();
    if (!data) return false;
    const count = Math.max(0, ...data.series.map((values) => values.length));
    this.plot = { ...data, ...valueRange(data.series, data), count, format: this.axis };
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

  /** Show the values at a token in the legend. */
  say(index) {
    const { series, first, count } = this.plot;
    const named = this.lines.map(({ name }, k) => ({ name, value: series[k]?.[index] })).filter(({ name }) => name);
    const texts = named.map(({ value }) => (value === undefined || Number.isNaN(value) ? "" : this.format(value)));
    texts.forEach((text, k) => setText(this.values[k], text));
    const token = index === null ? null : tokenAt(currentBranch(), first + index);
    const words = token ? `token ${index + 1}: ${visibleText(token.text)}` : "";
    setText(this.token, words);
    const spoken = named.map(({ name }, k) => texts[k] && `${name} ${texts[k]}`).filter(Boolean);
    setAttribute(this.hand, "aria-valuemax", Math.max(1, count));
    setAttribute(this.hand, "aria-valuenow", index === null ? Math.max(1, count) : index + 1);
    setAttribute(this.hand, "aria-valuetext", words ? `${words}, ${spoken.join(", ")}` : "no token");
  }

  // -- the slider -------------------------------------------------------------------------------

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
      event.stopPropagation(); // the text handles arrow keys too
    });
  }

  point(index) {
    const position = index === null || !this.plot?.count ? null : this.plot.first + index;
    if (state.hovered === position) return;
    state.hovered = position;
    changed("hover");
  }

  take(index) {
    if (index !== null && this.plot?.count) selectToken(this.plot.first + index);
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}
