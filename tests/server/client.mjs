// Uses the `openai` package for Node on a running server and prints what it got as JSON.
// Usage: node client.mjs URL PACKAGE_FOLDER, and on stdin {"model", "chat", "schema", "tool"}

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [url, folder] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(`${folder}/index.mjs`).href);
const { model, chat, schema, tool } = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const found = {};

found.models = [];
for await (const each of client.models.list()) found.models.push(each.id);

found.chat = (await client.chat.completions.create(chat)).choices[0].message.content;

const chunks = [];
const streamed = { ...chat, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(streamed)) chunks.push(chunk);
found.stream = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
found.usage = chunks.at(-1).usage.completion_tokens;

// The package puts the chunks together itself, and objects to chunks that are not as OpenAI's.
const calling = { ...chat, tools: [tool], tool_choice: "required", max_tokens: 100 };
const called = (await client.chat.completions.create(calling)).choices[0];
found.call = called.message.tool_calls[0].function;
found.reason = called.finish_reason;
const whole = await client.chat.completions.stream(calling).finalChatCompletion();
found.streamedCall = whole.choices[0].message.tool_calls[0].function;

const json_schema = { name: "person", strict: true, schema };
const formed = { ...chat, max_tokens: 100, response_format: { type: "json_schema", json_schema } };
found.json = (await client.chat.completions.create(formed)).choices[0].message.content;

const input = ["Leaves fall.", "Snow falls."]; // packed in base64 unless asked otherwise
found.embeddings = (await client.embeddings.create({ model, input })).data.map((d) => d.embedding);

const asked = { model, input: chat.messages[0].content, temperature: 0, max_output_tokens: 12 };
found.response = (await client.responses.create(asked)).output_text;

try {
  await client.chat.completions.create({ ...chat, model: "gpt-4" });
} catch (error) {
  found.error = { class: error.constructor.name, status: error.status, message: error.message };
}

console.log(JSON.stringify(found));
