// Drawing lines over tokens on a canvas: scales, ticks, and no more points than there are pixels.

/** About `wanted` round numbers that span the range. */
export function ticks(low, high, wanted = 3) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

/**
 * Where everything goes. `count` tokens lie side by side; a text that is just beginning does not
 * fill the width, or its first tokens would race across the picture.
 */
export function layout(width, height, { count, low, high }) {
  const left = 46, right = 6, top = 7, bottom = 18; // room for the numbers at the axes
  const slots = Math.max(count, 24);
  const across = width - left - right;
  const down = height - top - bottom;
  return {
    left, top, across, down, slots, count,
    x: (index) => left + ((index + 0.5) / slots) * across,
    y: (value) => top + (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low)) * down,
    /** Which token is under the pointer. */
    index: (x) => Math.min(count - 1, Math.max(0, Math.floor(((x - left) / across) * slots))),
  };
}

/** What the picture spans: all values and at least these bounds, or just these to clip what is over. */
export function range(series, { low = 0, high = 0, clip = false }) {
  for (const values of clip ? [] : series) {
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return { low, high: high > low ? high : low + 1 };
}

const numbers = new Intl.NumberFormat("en-US"); // made once: toLocaleString would make one each time

export function axes(pen, place, plot, colors) {
  pen.font = colors.font;
  pen.fillStyle = colors.quiet;
  pen.strokeStyle = colors.line;
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const value of ticks(plot.low, plot.high, 3)) {
    const y = Math.round(place.y(value)) + 0.5;
    stroke(pen, place.left, y, place.left + place.across, y);
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

function stroke(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

/** A curve. Of the tokens that share a column of pixels only the lowest and highest are drawn. */
export function curve(pen, place, values, high, { color, width = 1.5, dash = [], shade = false }) {
  pen.strokeStyle = pen.fillStyle = color;
  pen.lineWidth = width;
  pen.lineJoin = "round";
  pen.setLineDash(dash);
  const path = new Path2D();
  const over = []; // columns whose value lies above the picture
  let column = null, low = 0, top = 0, last = 0, begun = false, begin = 0;
  const flush = () => {
    if (column === null) return;
    if (!begun) path.moveTo((begin = column), place.y(low));
    path.lineTo(column, place.y(low));
    if (top !== low) path.lineTo(column, place.y(top));
    if (last !== top) path.lineTo(column, place.y(last));
    if (top > high) over.push(column);
    begun = true;
  };
  const end = () => {
    flush();
    if (begun && shade) shaded(pen, place, path, begin, column);
    column = null;
    begun = false;
  };
  const wide = place.slots < place.across; // every token has a column of its own
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
  for (const x of over) arrow(pen, x, place.top);
}

function shaded(pen, place, path, from, to) {
  const area = new Path2D(path);
  area.lineTo(to, place.y(0));
  area.lineTo(from, place.y(0));
  pen.globalAlpha = 0.14;
  pen.fill(area);
  pen.globalAlpha = 1;
}

function arrow(pen, x, y) {
  pen.beginPath();
  pen.moveTo(x, y - 5);
  pen.lineTo(x + 3.5, y);
  pen.lineTo(x - 3.5, y);
  pen.fill();
}

/** One token pointed at: a line down the picture, and a dot on every curve. */
export function pointed(pen, place, index, series, colors, color) {
  const x = place.x(index);
  pen.strokeStyle = color;
  pen.lineWidth = 1;
  stroke(pen, x, place.top, x, place.top + place.down);
  series.forEach((values, k) => {
    const value = values[index];
    if (!(value === value) || value === undefined) return;
    pen.beginPath();
    pen.arc(x, place.y(value), 3, 0, 7);
    pen.fillStyle = colors.lines[k];
    pen.fill();
  });
}
