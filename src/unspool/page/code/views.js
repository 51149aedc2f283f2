// The four places of the page, their views, and the panels beside a text: the only list of them. Each is loaded when it
// is first shown.
//
// A view of a feature stands here and in `unspool/features.py` (`page_views`), and nowhere else in the page. Its name
// is in the address (`?view=…`). `showsText`: the view shows the current text, so Escape closes its panel. `needsServer`:
// it is not shown where the model runs in the browser tab.

import { isTab } from "./tab/client.js";

export const PLACES = [
  { name: "write", title: "Write", about: "generate a text, inspect its tokens, and edit any of them" },
  { name: "compare", title: "Compare", about: "one prompt with several settings, samples or models, by search, or by diffusion" },
  { name: "explain", title: "Explain", about: "how a tokenizer, a forward pass, attention and diffusion work, with the current model" },
  { name: "lab", title: "Lab", about: "train small models, and measure what generation costs" },
];

const isHere = ({ needsServer = false }) => !isTab || !needsServer;

const ALL_VIEWS = [
  { name: "write", place: "write", title: "Write", file: "./write/view.js", component: "WriteView", showsText: true },
  { name: "settings", place: "compare", title: "Settings", file: "./compare/view.js", component: "CompareView", props: { picture: "settings" } },
  { name: "samples", place: "compare", title: "Samples", file: "./compare/view.js", component: "CompareView", props: { picture: "samples" } },
  { name: "models", place: "compare", title: "Models", file: "./compare/view.js", component: "CompareView", props: { picture: "models" }, needsServer: true },
  { name: "search", place: "compare", title: "Search", file: "./think/view.js", component: "ThinkView", needsServer: true },
  { name: "diffusion", place: "compare", title: "Diffusion", file: "./diffusion/view.js", component: "DiffusionView", needsServer: true },
  { name: "tokenizer", place: "explain", title: "Tokenizer", file: "./tokens/view.js", component: "TokensView" },
  { name: "token", place: "explain", title: "One token", file: "./explain/token.js", component: "OneTokenView", showsText: true },
  { name: "attention", place: "explain", title: "Attention", file: "./explain/attention.js", component: "AttentionView", showsText: true },
  { name: "sudoku", place: "explain", title: "Sudoku", file: "./diffusion/view.js", component: "SudokuView", needsServer: true },
  { name: "training", place: "lab", title: "Training runs", file: "./training/view.js", component: "TrainingView", showsText: true, needsServer: true },
  { name: "measure", place: "lab", title: "Cost report", file: "./measure/view.js", component: "MeasureView", needsServer: true },
  { name: "text", place: "lab", title: "Costs of a text", file: "./costs/view.js", component: "TextCostsView", showsText: true },
];

export const VIEWS = ALL_VIEWS.filter(isHere);
export const viewNamed = (name) => VIEWS.find((view) => view.name === name);
export const viewsOf = (place) => VIEWS.filter((view) => view.place === place);
/** The titles of the views of a place that need a server, where there is none. */
export const missingViews = (place) => ALL_VIEWS.filter((view) => view.place === place && !isHere(view)).map(({ title }) => title);

/** The tabs beside a text. The first has two levels. The keys 1 to 4 show the levels and the other tabs, in this order. */
export const PANELS = [
  { name: "step", tab: "token", title: "Sampling", file: "./step/panel.js", component: "StepPanel" },
  { name: "inside", tab: "token", title: "Inside the model", file: "./inside/panel.js", component: "InsidePanel" },
  { name: "branches", tab: "branches", title: "Branches", file: "./map/panel.js", component: "MapPanel" },
  { name: "context", tab: "context", title: "Context", file: "./write/context.js", component: "ContextPanel", needsServer: true },
  { name: "settings", tab: "settings", title: "Settings", file: "./write/side.js", component: "SettingsPanel" },
].filter(isHere);
