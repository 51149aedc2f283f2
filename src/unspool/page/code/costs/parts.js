// What the sections of the costs are made of.

import { html, nats } from "../lib.js";
import { useSettings } from "../actions.js";
import { branchNow, promptLength, state } from "../state.js";
import { tallyOf } from "./tally.js";

/** Figures beside each other: `[name, value, key for tests]`. */
export function Figures({ of }) {
  return html`<dl class="cost-figures">${of.map(([name, value, key]) => html`<div key=${name}>
    <dt class="quiet small">${name}</dt><dd data-figure=${key}>${value}</dd></div>`)}</dl>`;
}

/** For a chart: series from the figures of the branch that is shown. */
export const reading = (series, bounds) => () => {
  const branch = branchNow();
  return branch && { first: promptLength(branch), series: series(tallyOf(branch), branch), ...bounds };
};

/** A setting that is on or off; it holds from the next writing on. */
export function Switch({ setting, on, off, usual, children }) {
  const value = state.settings[setting] ?? usual;
  return html`<label class="cost-switch"><input type="checkbox" role="switch" checked=${value === on}
    onChange=${(event) => useSettings({ [setting]: event.target.checked ? on : off })} />
    <span>${children}</span></label>`;
}

/** A number of nats with its sign. */
export const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${nats(Math.abs(value))}`;

/** 10 to a negative power, where a plain number would be all zeros. */
export const Power = ({ exponent }) => html`10<sup>${exponent < 0 ? "−" : ""}${Math.abs(exponent)}</sup>`;

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

/** The same as plain text. */
export const power = (exponent) => `10${[...String(Math.round(exponent))].map((sign) => RAISED[sign]).join("")}`;
