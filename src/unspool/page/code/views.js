// The views of the page and the panels beside a text: the only list of them. Each is loaded when it is first shown.
//
// A view of a feature stands here and in `unspool/features.py` (`page_views`), and nowhere else in the page.
// `showsText`: the view can show the current text, so Escape closes its panel. `query`: a parameter of the address
// that opens the view.

export const VIEWS = [
  { name: "write", title: "Write", file: "./write/view.js", component: "WriteView", showsText: true },
  { name: "tokens", title: "Tokens", file: "./tokens/view.js", component: "TokensView" },
  { name: "compare", title: "Compare", file: "./compare/view.js", component: "CompareView" },
  { name: "training", title: "Training", file: "./training/view.js", component: "TrainingView", showsText: true, query: "run" },
  { name: "diffusion", title: "Diffusion", file: "./diffusion/view.js", component: "DiffusionView" },
  { name: "think", title: "Think", file: "./think/view.js", component: "ThinkView" },
  { name: "measure", title: "Measure", file: "./measure/view.js", component: "MeasureView" },
];

/** The keys 1 to 5 show them, in this order. */
export const PANELS = [
  { name: "step", title: "Step", file: "./step/panel.js", component: "StepPanel" },
  { name: "inside", title: "Inside", file: "./inside/panel.js", component: "InsidePanel" },
  { name: "map", title: "Map", file: "./map/panel.js", component: "MapPanel" },
  { name: "costs", title: "Costs", file: "./costs/panel.js", component: "CostsPanel" },
  { name: "settings", title: "Settings", file: "./write/side.js", component: "SettingsPanel" },
];
