// The prompt bar of the Compare place: one prompt, mode and length for all its views. It outlives them.

import { promptBody, promptWords, setMode } from "../actions.js";
import { html, ModeSegments, useChanges } from "../lib.js";
import { changed, currentBranch, currentModel, state } from "../state.js";

const EXAMPLE = "Why do leaves change color in fall?";

/** Topic "prompt". */
export const shared = {
  text: null, // null: the prompt of the Write view, or else the example
  length: "60",
  fault: null,
};

export function setShared(values) {
  Object.assign(shared, { fault: null, ...values });
  changed("prompt");
}

export const currentPrompt = () => shared.text ?? (state.draft || promptWords(currentBranch()) || EXAMPLE);
export const isExample = () => currentPrompt() === EXAMPLE;

/** The prompt and max_tokens of a request; null if a field is not valid, which is then shown. */
export function readPrompt(canChat = true) {
  const words = currentPrompt();
  const length = Number(shared.length);
  setShared({ fault: words.trim() === "" ? { message: "Enter a prompt first.", param: "prompt" }
    : !(Number.isInteger(length) && length > 0)
      ? { message: `Max tokens must be an integer >= 1, got “${shared.length}”.`, param: "length" } : null });
  return shared.fault ? null : { ...(canChat ? promptBody(words) : { prompt: words }), max_tokens: length };
}

export function PromptBar({ running, start, stop, canStart = true, hasLength = true, canChat = currentModel()?.unspool.chat !== false }) {
  useChanges("prompt", "mode", "models", "draft", "current");
  const { fault } = shared;
  const invalid = (param) => (fault?.param === param ? "true" : null);
  const submit = (event) => {
    event.preventDefault();
    if (!running && canStart) start();
  };
  const enter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && submit(event);
  return html`<form class="panel stack prompt-bar" onSubmit=${submit} aria-label="Prompt">
    <label><span class="visually-hidden">Prompt</span>
      <textarea class="field" name="prompt" rows="2" dir="auto" placeholder=${state.mode === "chat" ? "Your message" : "Text to continue"}
        aria-invalid=${invalid("prompt")} value=${currentPrompt()} onKeyDown=${enter}
        onInput=${(event) => setShared({ text: event.target.value })} /></label>
    <div class="row">
      <${ModeSegments} mode=${canChat ? state.mode : "plain"} pick=${setMode} canChat=${canChat} />
      ${hasLength && html`<label class="row prompt-length"><span>Max tokens</span>
        <input class="field" name="length" type="text" inputmode="numeric" autocomplete="off" value=${shared.length}
          aria-invalid=${invalid("length")} onInput=${(event) => setShared({ length: event.target.value })} /></label>`}
      ${running ? html`<button class="button" type="button" id="run-stop" onClick=${stop}>Stop</button>`
        : html`<button class="button main" id="run" disabled=${!canStart}>Run</button>`}
    </div>
    ${fault && html`<p class="fault" role="alert">${fault.message}</p>`}
  </form>`;
}
