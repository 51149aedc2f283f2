// The page of `GenerationWidget`: tokens, the candidates at one of them, and the controls.

const percent = (value) => (value >= 0.001 ? `${(100 * value).toFixed(1)} %` : value.toPrecision(2));
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(empty)";

function element(name, properties = {}, children = []) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function render({ model, el }) {
  let openIndex = null; // of the token whose candidates are shown
  let candidates = null;

  const prompt = element("span", { className: "prompt" });
  const output = element("span");
  const text = element("div", { className: "text" }, [prompt, output]);
  const stop = element("button", { type: "button", textContent: "Stop" });
  const resume = element("button", { type: "button", textContent: "Continue" });
  const back = element("button", { type: "button", textContent: "◀", title: "Version before" });
  const forward = element("button", { type: "button", textContent: "▶", title: "Version after" });
  const versions = element("span");
  const status = element("span", { role: "status" });
  const controls = element("div", { className: "controls" }, [
    stop, resume, back, versions, forward, status,
  ]);
  const panel = element("div", { className: "candidates", hidden: true });
  const legend = element("div");
  el.append(
    element("div", { className: "unspool unspool-widget" }, [text, panel, controls, legend]),
  );

  stop.onclick = () => model.send({ kind: "stop" });
  resume.onclick = () => model.send({ kind: "resume" });
  back.onclick = () => showVersion(model.get("version") - 1);
  forward.onclick = () => showVersion(model.get("version") + 1);

  function showVersion(index) {
    close();
    model.send({ kind: "version", index });
  }

  function open(index) {
    openIndex = index;
    candidates = null;
    model.send({ kind: "candidates", index });
    drawTokens();
    drawPanel();
  }

  function close() {
    const closed = openIndex;
    openIndex = null;
    drawPanel();
    drawTokens();
    if (closed !== null) output.children[closed]?.focus();
  }

  function rewrite(choice) {
    const index = openIndex;
    openIndex = null;
    drawPanel();
    model.send({ kind: "rewrite", index, ...choice });
  }

  // Spans are kept while their token stays, so that focus and selection survive an update.
  function drawTokens() {
    const tokens = model.get("tokens");
    prompt.textContent = model.get("prompt_text");
    while (output.children.length > tokens.length) output.lastChild.remove();
    tokens.forEach((token, index) => {
      let span = output.children[index];
      if (!span) {
        span = element("span", { tabIndex: 0 });
        span.setAttribute("role", "button");
        span.onclick = () => (openIndex === index ? close() : open(index));
        span.onkeydown = (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          span.click();
        };
        output.append(span);
      }
      const title = `${JSON.stringify(token.text)}, token ${token.token}, ${percent(token.probability)}`;
      if (span.textContent !== token.text) span.textContent = token.text;
      if (span.title !== title) {
        span.title = title;
        span.style.cssText = token.style;
      }
      const names = [token.chosen && "chosen", index === openIndex && "open"].filter(Boolean);
      span.className = names.join(" ");
    });
  }

  function drawPanel() {
    panel.hidden = openIndex === null;
    if (openIndex === null) return;
    const token = model.get("tokens")[openIndex];
    const heading = `Instead of ${JSON.stringify(token?.text ?? "")}, token ${openIndex}:`;
    const list = element("ol");
    const largest = Math.max(...(candidates ?? []).map((candidate) => candidate.probability), 1e-9);
    for (const candidate of candidates ?? []) {
      const button = element("button", { type: "button", textContent: visible(candidate.text) });
      button.onclick = () => rewrite({ token: candidate.token });
      const bar = element("span", { className: "bar" });
      bar.style.width = `${(10 * candidate.probability) / largest}em`;
      const item = element("li", {}, [button, bar, percent(candidate.probability)]);
      if (candidate.token === token?.token) item.className = "written";
      list.append(item);
    }
    const input = element("input", { placeholder: "text of your own", size: 18 });
    input.setAttribute("aria-label", "Text to put here");
    const form = element("form", { className: "controls" }, [
      input,
      element("button", { textContent: "Write on from here" }),
      element("button", { type: "button", textContent: "Close", onclick: close }),
    ]);
    form.onsubmit = (event) => {
      event.preventDefault();
      if (input.value) rewrite({ text: input.value });
    };
    // The notebook has keyboard shortcuts of one letter.
    panel.onkeydown = (event) => {
      if (event.key === "Escape") close();
      event.stopPropagation();
    };
    panel.replaceChildren(heading, candidates ? list : " …", form);
  }

  function drawControls() {
    const running = model.get("running");
    const count = model.get("num_versions");
    const version = model.get("version");
    stop.disabled = !running;
    resume.disabled = running;
    back.hidden = forward.hidden = versions.hidden = count < 2;
    back.disabled = version <= 0;
    forward.disabled = version >= count - 1;
    versions.textContent = `version ${version + 1} of ${count}`;
    status.textContent = model.get("status");
  }

  function onMessage(message) {
    if (message?.kind !== "candidates" || message.index !== openIndex) return;
    candidates = message.candidates;
    drawPanel();
    panel.querySelector("li button")?.focus();
  }

  const listeners = [
    ["change:tokens", drawTokens],
    ["change:prompt_text", drawTokens],
    ["change:running", drawControls],
    ["change:status", drawControls],
    ["change:version", drawControls],
    ["change:num_versions", drawControls],
    ["msg:custom", onMessage],
  ];
  for (const [name, listener] of listeners) model.on(name, listener);
  legend.innerHTML = model.get("legend"); // written by Unspool, without any text of a model
  drawTokens();
  drawControls();
  return () => {
    for (const [name, listener] of listeners) model.off(name, listener);
  };
}

export default { render };
