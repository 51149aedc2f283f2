// Where a text begins: the prompt, as a question to the model or as words to go on with.

import { html, useChanges } from "../lib.js";
import { changed, modelNow, state } from "../state.js";
import { write } from "../actions.js";

const EXAMPLE = "Why do leaves change color in fall?";

export function Composer() {
  useChanges("mode", "draft", "server", "system");
  const isChat = state.mode === "chat";

  const submit = (event) => {
    event.preventDefault();
    if (!state.draft && isChat) state.draft = EXAMPLE;
    changed("draft");
    write();
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const put = (name) => (event) => {
    state[name] = event.target.value;
    changed(name);
  };
  return html`<form class="composer" onSubmit=${submit} aria-label="Prompt">
    ${isChat && state.system !== null && html`<input class="field small" aria-label="System message" id="system"
      placeholder="System message: how the model should behave" value=${state.system} onInput=${put("system")} />`}
    <div class="composer-row">
      <textarea id="prompt" class="field" rows="1" value=${state.draft} dir="auto"
        aria-label=${isChat ? "Your question" : "A beginning for the model to go on with"}
        placeholder=${isChat ? EXAMPLE : "Once upon a time"} onInput=${put("draft")} onKeyDown=${onKey}></textarea>
      <button id="write" class="button main" type="submit" disabled=${!state.server.ready}>Write</button>
    </div>
  </form>`;
}

/** Whether the words are a question or a beginning. */
export function ModeChoice() {
  useChanges("mode", "models", "system");
  const isChat = state.mode === "chat";
  const canChat = modelNow()?.unspool?.chat ?? true;
  const set = (mode) => () => {
    state.mode = mode;
    changed("mode");
  };
  const toggleSystem = () => {
    state.system = state.system === null ? "" : null;
    changed("system");
  };
  return html`<div class="segments" role="group" aria-label="Mode">
      <button type="button" aria-pressed=${isChat} disabled=${!canChat} onClick=${set("chat")}
        title="Your words go into the model's chat template">Chat</button>
      <button type="button" aria-pressed=${!isChat} onClick=${set("plain")}
        title="The model goes on with just your words">Plain</button>
    </div>
    ${isChat && html`<button type="button" class="button plain tiny folds" aria-pressed=${state.system !== null}
      title="How the model should behave" onClick=${toggleSystem}>System</button>`}`;
}
