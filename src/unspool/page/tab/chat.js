// Chat prompts in ChatML, the template of the default model and of Qwen.

import { TabError } from "./errors.js";

const SYSTEM = /<\|im_start\|>system\\?n?\n?(You are [^<'{]*?)<\|im_end\|>/;

/** The default system message of a ChatML template; null if it has none. */
export function readTemplate(template) {
  if (!template?.includes("<|im_start|>") || !template.includes("<|im_end|>")) return null;
  return { system: template.match(SYSTEM)?.[1] ?? null };
}

/** The messages as the template writes them: `[{role, content}]`, with the default system message. */
export function chatTurns(chat, messages) {
  if (!chat) throw new TabError("unsupported_model", "The tab supports chat only with templates in ChatML, and this model has another one.");
  for (const { role, content } of messages) {
    if (typeof role !== "string" || typeof content !== "string") {
      throw new TabError("unsupported_setting", "A message must have a role and a content, both text.");
    }
  }
  const needsSystem = chat.system !== null && messages[0]?.role !== "system";
  return needsSystem && messages.length ? [{ role: "system", content: chat.system }, ...messages] : messages;
}
