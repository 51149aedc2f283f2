// File formats of other programs: a tree of texts to a file, and back. Pure functions, without DOM and requests.
//
// A tree: `{title, isChat, model, parts?, children}`; a node: `{role, text, children, steps?}`. In a chat each node is a
// message; in a plain text it is a piece of the text, and `role` is "user" for the prompt. Nothing here recurses: a file
// may be nested as deeply as it likes.

import { isTemplate, promptLength } from "../state.js";
import { BadFile } from "./bad_file.js";
import { mikupadOf, partsOfKobold, partsOfMikupad, partsOfTavern, tavernOf } from "./lorebook.js";

export { BadFile };

const MAX_TEXTS = 5000; // nodes of a file
const MAX_TREES = 200; // conversations of a file
const ROLES = { // names of other programs; results of tools are visible to the model as the user's
  human: "user", gpt: "assistant", model: "assistant", bot: "assistant", chatgpt: "assistant", developer: "system",
  tool: "user", function: "user", observation: "user",
};
const KNOWN_ROLES = ["system", "user", "assistant"];

const newTree = (fields) => ({ title: null, isChat: true, model: null, children: [], ...fields });
const newNode = (role, text, fields) => ({ role, text, children: [], ...fields });

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const ownValue = (object, name) => (isObject(object) && Object.hasOwn(object, name) ? object[name] : undefined);
const list = (value) => (Array.isArray(value) ? value : []);

/** A string of the file. Missing: "". Anything else is an error that names the place. */
function textAt(value, at) {
  if (value === undefined || value === null) return "";
  if (typeof value !== "string") throw new BadFile(`Invalid file: ${at} must be a string, got ${shortJson(value)}.`);
  return value;
}

function shortJson(value) {
  if (typeof value === "object" && value !== null) return Array.isArray(value) ? "an array" : "an object";
  const text = JSON.stringify(value) ?? "nothing";
  return text.length > 40 ? `${text.slice(0, 40)}…` : text;
}

const several = (n, singular, many = `${singular}s`) => `${n} ${n === 1 ? singular : many}`;

function roleOf(value, at) {
  const name = textAt(value, at).toLowerCase();
  const role = ROLES[name] ?? name;
  if (!KNOWN_ROLES.includes(role)) throw new BadFile(`Invalid file: ${at} must be a role, got ${shortJson(value)}.`);
  return role;
}

// -- conversations: the paths of a chat, and the tree of those that begin alike ------------------

/** Every path from the root to a leaf, as lists of nodes; siblings in order. */
export function pathsOf(tree) {
  const paths = [];
  const path = [];
  const todo = tree.children.map((child) => [child, 0]).reverse();
  while (todo.length) {
    const [node, depth] = todo.pop();
    path.splice(depth, Infinity, node);
    if (!node.children.length) paths.push([...path]);
    for (let at = node.children.length - 1; at >= 0; at -= 1) todo.push([node.children[at], depth + 1]);
  }
  return paths;
}

/** Add a conversation, a list of `{role, text}`, to a tree; messages that it shares with others are there once. */
function addConversation(tree, messages) {
  let at = tree;
  for (const message of messages) {
    let next = at.children.find(({ role, text }) => role === message.role && text === message.text);
    if (!next) at.children.push(next = newNode(message.role, message.text));
    at = next;
  }
}

/** Neighbouring messages of one role, such as several characters of a group chat, become one message. */
function joinTurns(messages) {
  const turns = [];
  for (const { role, text } of messages) {
    const last = turns.at(-1);
    if (last?.role === role) last.text += `\n\n${text}`;
    else turns.push({ role, text });
  }
  return turns;
}

const isPrefix = (some, messages) =>
  some.length <= messages.length && some.every(({ role, text }, at) => messages[at].role === role && messages[at].text === text);

/** Trees of conversations: those that begin with the same message share a tree. */
function treesOf(conversations, fields) {
  if (conversations.length > MAX_TEXTS) tooMany(conversations.length, "conversations", MAX_TEXTS);
  const trees = new Map();
  for (const messages of conversations.map(joinTurns)) {
    if (!messages.length) continue;
    const key = JSON.stringify([messages[0].role, messages[0].text, messages[0].role === "system" ? messages[1]?.text : null]);
    if (!trees.has(key)) trees.set(key, newTree(fields));
    addConversation(trees.get(key), messages);
  }
  return [...trees.values()];
}

// -- socketteer/loom: nodes with texts and children, in data/*.json (model.py: load_tree_data, save_simple_tree) ------

/** Copy a tree of a file; `read(value, at)` gives `{role, text, children}` with the children still of the file. */
function copyTree(roots, read) {
  const tree = { children: [] };
  const todo = roots.map((value, number) => [value, tree, `node ${number + 1}`]).reverse();
  let size = 0;
  while (todo.length) {
    const [value, parent, at] = todo.pop();
    if (!isObject(value)) throw new BadFile(`Invalid file: ${at} must be an object, got ${shortJson(value)}.`);
    size += 1;
    if (size > MAX_TEXTS) tooMany(size, "texts", MAX_TEXTS, "more than ");
    const { role, text, children } = read(value, at);
    const node = newNode(role, text);
    parent.children.push(node);
    for (let child = children.length - 1; child >= 0; child -= 1) todo.push([children[child], node, `${at.slice(-60)}, child ${child + 1}`]);
  }
  return tree.children;
}

function tooMany(number, what, most, prefix = "") {
  throw new BadFile(`The file has ${prefix}${number} ${what}; at most ${most} can be opened.`);
}

const isLoom = (data) => isLoomNode(ownValue(data, "root")) || isLoomNode(data)
  || (Array.isArray(data) && data.length > 0 && data.every(isLoomNode));
const isLoomNode = (value) => isObject(value) && Array.isArray(ownValue(value, "children")) && !("messages" in value);

function readLoom(data) {
  const roots = Array.isArray(data) ? data : [ownValue(data, "root") ?? data];
  const children = copyTree(roots, (node, at) => ({
    role: "assistant", text: textAt(ownValue(node, "text"), `text of ${at}`), children: list(ownValue(node, "children")),
  }));
  return { trees: [newTree({ isChat: false, children: withoutEmpty(children) })], notes: [] };
}

/** Loom starts each tree with empty nodes; nodes without text are replaced by their children. */
function withoutEmpty(children) {
  const tree = { children };
  const todo = [tree];
  while (todo.length) {
    const node = todo.pop();
    while (node.children.some((child) => child.text === "" && child.children.length)) {
      node.children = node.children.flatMap((child) => (child.text === "" && child.children.length ? child.children : [child]));
    }
    if (node.children.length > 1) node.children = node.children.filter((child) => child.text !== "");
    todo.push(...node.children);
  }
  return tree.children;
}

function writeLoom(tree) {
  let number = 0;
  const copy = (node) => ({ id: `${++number}`, text: node.text, children: [], mutable: true, visited: true });
  const root = { ...copy({ text: "" }), mutable: false };
  const todo = [[tree, root]];
  while (todo.length) {
    const [node, target] = todo.pop();
    for (const child of node.children) {
      const childCopy = { ...copy(child), parent_id: target.id };
      target.children.push(childCopy);
      todo.push([child, childCopy]);
    }
  }
  return JSON.stringify({ root, selected_node_id: root.children[0]?.id ?? root.id });
}

// -- OpenLoom 1.0 (rocketbro/rocketbro.github.io, projects/openloom) and Open Loom 2.0 (Aspen Grove: blocks and edges) ---

const isOpenLoom = (data) => ownValue(data, "format") === "open-loom" || (isObject(ownValue(data, "nodes")) && typeof ownValue(data, "rootNodeId") === "string");

function readOpenLoom(data) {
  const notes = [];
  const trees = ownValue(data, "format") === "open-loom" ? list(data.trees) : [data];
  if (!trees.length) throw new BadFile("The file has no trees.");
  return { trees: trees.map((tree) => readLoomTree(tree, notes)), notes };
}

function readLoomTree(tree, notes) {
  const nodes = ownValue(tree, "nodes");
  if (!isObject(nodes)) throw new BadFile("Invalid file: nodes must be an object.");
  const children = new Map();
  for (const edge of list(ownValue(tree, "edges"))) { // 2.0
    const sources = list(ownValue(edge, "sources"));
    const source = sources.find((item) => ownValue(item, "role") !== "context" && ownValue(item, "role") !== "instruction") ?? sources[0];
    const id = ownValue(source, "nodeId");
    children.set(id, [...(children.get(id) ?? []), ownValue(edge, "targetNodeId")]);
  }
  const isPlain = ownValue(tree, "mode") === "plain";
  const used = new Set();
  let media = 0;
  const takeNode = (id, at) => {
    if (typeof id !== "string" || !Object.hasOwn(nodes, id)) throw new BadFile(`Invalid file: ${at} names no node: ${shortJson(id)}.`);
    if (used.has(id)) throw new BadFile(`Invalid file: node ${shortJson(id)} has two parents or is its own ancestor.`);
    used.add(id);
    return { ...nodes[id], id };
  };
  const roots = ownValue(tree, "rootNodeIds") ?? [ownValue(tree, "rootNodeId")];
  const copied = copyTree(list(roots).map((id) => takeNode(id, "the root")), (node, at) => {
    const ids = Array.isArray(ownValue(node, "childrenIds")) ? node.childrenIds : children.get(node.id) ?? [];
    const blocks = ownValue(node, "content");
    media += list(blocks).filter((block) => ownValue(block, "type") !== "text").length;
    const text = Array.isArray(blocks)
      ? blocks.map((block) => textAt(ownValue(block, "text"), `content of ${at}`)).join("")
      : textAt(ownValue(node, "text"), `text of ${at}`);
    const author = ownValue(ownValue(node, "author"), "role") ?? ownValue(node, "author");
    const role = { human: "user", model: "assistant", mixed: "assistant" }[author] ?? author;
    return { role: isPlain ? "assistant" : roleOf(role, `author of ${at}`), text, children: ids.map((id) => takeNode(id, `a child of ${at}`)) };
  });
  if (media) notes.push(`Left out: ${several(media, "image or sound", "images or sounds")}.`);
  const system = textAt(ownValue(tree, "systemMessage") ?? ownValue(tree, "systemContext"), "systemMessage");
  return newTree({
    title: textAt(ownValue(tree, "title"), "title") || null, isChat: !isPlain,
    children: system && !isPlain ? [newNode("system", system, { children: copied })] : copied,
  });
}

function writeOpenLoom(tree, { now }) {
  const nodes = {};
  let number = 0;
  const [system] = tree.children.length === 1 && tree.children[0].role === "system" ? tree.children : [];
  const top = system ?? tree;
  // The format has one root: several first messages become children of an empty one.
  const start = top.children.length === 1 ? top.children[0] : newNode("system", "", { children: top.children });
  const add = (node, parentId) => {
    const id = `node-${++number}`;
    nodes[id] = {
      id, text: node.text, author: node.role, modelId: node.role === "assistant" ? tree.model ?? "" : "User",
      createdTime: now, parentId, childrenIds: [], rememberedChildId: null, isBookmarked: false, bookmarkTitle: null,
    };
    if (parentId) {
      nodes[parentId].childrenIds.push(id);
      nodes[parentId].rememberedChildId ??= id;
    }
    return id;
  };
  const rootNodeId = add(start, null);
  const todo = [[start, rootNodeId]];
  let currentNodeId = rootNodeId;
  while (todo.length) {
    const [node, id] = todo.pop();
    for (const child of node.children) todo.push([child, add(child, id)]);
  }
  while (nodes[currentNodeId].childrenIds.length) [currentNodeId] = nodes[currentNodeId].childrenIds;
  return JSON.stringify({
    id: "tree-1", title: tree.title ?? "Unspool", description: null, lastModified: now, systemMessage: system?.text ?? "",
    rootNodeId, currentNodeId, nodes, bookmarkedNodes: {}, ...(tree.isChat ? {} : { mode: "plain" }),
  });
}

// -- lmg-anon/mikupad: the values of a session as JSON in strings; its database export ("Export Full DB") holds many ----

const isMikupad = (data) => (isObject(data) && typeof ownValue(data, "prompt") === "string" && data.prompt.trimStart().startsWith("["))
  || Array.isArray(ownValue(data, "Sessions"));

function readMikupad(data) {
  const sessions = Array.isArray(ownValue(data, "Sessions"))
    ? data.Sessions.filter((item) => Array.isArray(ownValue(ownValue(item, "value"), "prompt"))).map((item) => {
      const name = list(ownValue(data, "Names")).find((entry) => ownValue(entry, "key") === item.key);
      return { ...item.value, name: ownValue(name, "value") ?? ownValue(item.value, "name") };
    })
    : [Object.fromEntries(["name", "prompt", "memoryTokens", "authorNoteTokens", "authorNoteDepth", "worldInfo"].map((name) => [name, parseValue(ownValue(data, name), name)]))];
  if (sessions.length > MAX_TREES) tooMany(sessions.length, "sessions", MAX_TREES);
  const trees = sessions.map((session) => {
    const pieces = list(ownValue(session, "prompt")).map((chunk, at) => ({
      role: ownValue(chunk, "type") === "user" ? "user" : "assistant", text: textAt(ownValue(chunk, "content"), `prompt[${at}].content`),
    }));
    const title = typeof session.name === "string" ? session.name : null;
    return newTree({ title, isChat: false, parts: partsOfMikupad(session), children: chainOf(joinPieces(pieces)) });
  });
  return { trees: trees.filter((tree) => tree.children.length), notes: [] };
}

function parseValue(value, name) {
  if (typeof value !== "string") return value;
  try {
    return JSON.parse(value);
  } catch {
    if (name === "name") return value;
    throw new BadFile(`Invalid file: ${name} is not valid JSON in a string.`);
  }
}

/** Neighbouring pieces of one author as one piece: mikupad has one for each token. */
function joinPieces(pieces) {
  const joined = [];
  for (const { role, text } of pieces) {
    if (joined.at(-1)?.role === role) joined.at(-1).parts.push(text);
    else joined.push({ role, parts: [text] });
  }
  return joined.map(({ role, parts }) => ({ role, text: parts.join("") })).filter(({ text }) => text);
}

/** Pieces as a chain of nodes. */
function chainOf(pieces) {
  return pieces.reduceRight((children, { role, text }) => [newNode(role, text, { children })], []);
}

function writeMikupad(tree) {
  const chunks = pathsOf(tree)[0].flatMap((node) => {
    if (!node.steps) return [{ type: node.role === "assistant" ? "assistant" : "user", content: node.text }];
    return node.steps.filter((step) => step.text !== "").map((step) => (step.chosen ? { type: "user", content: step.text } : {
      content: step.text, prob: step.probability,
      ...(step.candidates.length ? { completion_probabilities: [{ content: step.text, probs: step.candidates }] } : {}),
    }));
  });
  const values = { name: tree.title ?? "Unspool", prompt: chunks, ...(tree.parts ? mikupadOf(tree.parts) : {}) };
  return JSON.stringify(Object.fromEntries(Object.entries(values).map(([name, value]) => [name, JSON.stringify(value)])));
}

// -- SillyTavern/SillyTavern: one JSON object a line, the header first; `swipes` are other versions of a message --------

const isTavern = (rows) => rows.length > 0 && rows.every(isObject)
  && (typeof ownValue(rows[0], "mes") === "string" || "user_name" in rows[0] || "chat_metadata" in rows[0]) && !("messages" in rows[0]);

function readTavern(rows) {
  const notes = [];
  const messages = rows.filter((row) => "mes" in row);
  const visible = messages.filter((row) => ownValue(row, "is_system") !== true);
  if (visible.length < messages.length) notes.push(`Left out: ${several(messages.length - visible.length, "hidden message")}.`);
  const isNarrator = (row) => ownValue(ownValue(row, "extra"), "type") === "narrator";
  const speakers = new Set(visible.filter((row) => !ownValue(row, "is_user") && !isNarrator(row)).map((row) => ownValue(row, "name")));
  const isGroup = speakers.size > 1;
  if (isGroup) notes.push("A group chat: the names of the characters are part of their messages.");
  const tree = newTree({ title: textAt(ownValue(rows[0], "character_name"), "character_name") || null });
  let at = tree;
  let size = 0;
  visible.forEach((row, number) => {
    const place = `message ${number + 1}`;
    const role = ownValue(row, "is_user") ? "user" : isNarrator(row) ? "system" : "assistant";
    const named = (text) => (isGroup && role === "assistant" ? `${textAt(ownValue(row, "name"), `name of ${place}`)}: ${text}` : text);
    const text = named(textAt(ownValue(row, "mes"), `mes of ${place}`));
    const swipes = list(ownValue(row, "swipes")).map((swipe) => named(textAt(swipe, `a swipe of ${place}`)));
    size += 1 + swipes.length;
    if (size > MAX_TEXTS) tooMany(size, "texts", MAX_TEXTS, "more than ");
    if (at.role === role) { // characters of a group after one another
      at.text += `\n\n${text}`;
      return;
    }
    const all = [...new Set(role === "assistant" ? [...swipes, text] : [text])];
    const nodes = all.map((words) => newNode(role, words));
    at.children.push(...nodes.filter((node) => node.text !== "" || node.text === text));
    at = nodes.find((node) => node.text === text);
  });
  return { trees: tree.children.length ? [{ ...tree, parts: partsOfTavern(ownValue(rows[0], "chat_metadata")), current: at }] : [], notes };
}

function writeTavern(tree, { now }) {
  const name = tree.title ?? "Assistant";
  const lines = [{ user_name: "You", character_name: name, create_date: now, chat_metadata: tavernOf(tree.parts) }];
  let at = tree;
  const path = pathsOf(tree)[0] ?? [];
  for (const node of path) {
    const isUser = node.role === "user";
    const isNarrator = node.role === "system";
    const row = {
      name: isUser ? "You" : isNarrator ? "System" : name, is_user: isUser, is_system: false, send_date: now, mes: node.text,
      extra: isNarrator ? { type: "narrator" } : {},
    };
    const versions = at.children.filter(({ role }) => role === "assistant").map(({ text }) => text);
    if (node.role === "assistant" && versions.length > 1) {
      Object.assign(row, { swipe_id: versions.indexOf(node.text), swipes: versions, swipe_info: versions.map(() => ({ send_date: now, extra: {} })) });
    }
    lines.push(row);
    at = node;
  }
  return lines.map((line) => JSON.stringify(line)).join("\n");
}

// -- KoboldAI and KoboldAI Lite: the prompt and what followed it, memory, author's note and world info --------------

const isKobold = (data) => isObject(data) && typeof ownValue(data, "prompt") === "string" && Array.isArray(ownValue(data, "actions"));

function readKobold(data) {
  const pieces = [{ role: "user", text: data.prompt }, ...data.actions.map((action, at) => ({ role: "assistant", text: textAt(action, `actions[${at}]`) }))];
  return { trees: [newTree({ isChat: false, parts: partsOfKobold(data), children: chainOf(joinPieces(pieces)) })], notes: [] };
}

// -- ShareGPT and OpenAI messages: a conversation an entry ------------------------------------------

const conversationIn = (row) => [ownValue(row, "conversations"), ownValue(row, "messages"), row].find(
  (value) => Array.isArray(value) && value.length && value.every((item) => isObject(item) && ("role" in item || "from" in item)));
const isConversations = (rows) => rows.length > 0 && rows.some(conversationIn);

function readConversations(rows) {
  const notes = [];
  let [noText, others] = [0, 0];
  const conversations = rows.flatMap((row, number) => {
    const messages = conversationIn(row);
    if (!messages) {
      others += 1;
      return [];
    }
    const system = textAt(ownValue(row, "system"), `system of entry ${number + 1}`);
    const turns = messages.map((message, at) => {
      const place = `message ${at + 1} of entry ${number + 1}`;
      const content = ownValue(message, "content") ?? ownValue(message, "value");
      if (Array.isArray(content)) noText += content.filter((part) => ownValue(part, "type") !== "text").length;
      if (list(ownValue(message, "tool_calls")).length) noText += 1;
      const text = Array.isArray(content)
        ? content.map((part) => textAt(ownValue(part, "text"), `content of ${place}`)).join("")
        : textAt(content, `content of ${place}`);
      return { role: roleOf(ownValue(message, "role") ?? ownValue(message, "from"), `role of ${place}`), text };
    });
    return [system ? [{ role: "system", text: system }, ...turns] : turns];
  });
  if (others) notes.push(`Left out: ${several(others, "entry", "entries")} without messages.`);
  if (noText) notes.push(`Left out: ${several(noText, "image or tool call", "images or tool calls")}.`);
  const trees = treesOf(conversations, {});
  if (trees.length > MAX_TREES) tooMany(trees.length, "conversations", MAX_TREES);
  return { trees, notes };
}

const messagesOf = (path) => path.map(({ role, text }) => ({ role, content: text }));
const shareGptOf = (path) => path.map(({ role, text }) => ({ from: { user: "human", assistant: "gpt" }[role] ?? role, value: text }));

// -- Markdown and plain text --------------------------------------------------------------------------

const HEADING = /^## (system|user|assistant)[ \t]*$/i;

/** Turns under headings such as `## user`; other text has no turns. */
function readMarkdown(text) {
  const turns = [];
  for (const line of text.split("\n")) {
    const role = HEADING.exec(line)?.[1].toLowerCase();
    if (role) turns.push({ role, lines: [] });
    else if (turns.length) turns.at(-1).lines.push(line.replace(/^\\(?=\\*## )/, ""));
    else if (line.trim() && !line.startsWith("# ")) return null;
  }
  if (!turns.length) return null;
  const title = /^# (.+)$/m.exec(text.split(/^## /m)[0])?.[1].trim() ?? null;
  return newTree({ title, children: chainOf(joinTurns(turns.map(({ role, lines }) => ({ role, text: lines.join("\n").replace(/^\n|\n+$/g, "") })))) });
}

function writeMarkdown(tree) {
  const path = pathsOf(tree)[0] ?? [];
  if (!tree.isChat) return path.map(({ text }) => text).join("");
  const escape = (text) => text.split("\n").map((line) => (/^\\*## /.test(line) ? `\\${line}` : line)).join("\n");
  const turns = path.map(({ role, text }) => `## ${role}\n\n${escape(text)}\n`);
  return [...(tree.title ? [`# ${tree.title}\n`] : []), ...turns].join("\n");
}

const roleTitle = (role) => role[0].toUpperCase() + role.slice(1);

function writePlain(tree) {
  const path = pathsOf(tree)[0] ?? [];
  return path.map(({ role, text }) => (tree.isChat ? `${roleTitle(role)}: ${text}\n\n` : text)).join("");
}

// -- the list -------------------------------------------------------------------------------------------
//
// `input`: the tree that `write` takes: "messages" (a node is a message), "pieces" (as raw text, with the control tokens of
// the chat template), "both" (messages if it is a chat). `holds`: what becomes of branches: "all", "swipes" (other versions
// of an answer, without what follows them), "paths" (each as a conversation), "one" (only the current text).

export const FORMATS = {
  openloom: { title: "OpenLoom", extension: "json", input: "both", holds: "all", write: writeOpenLoom },
  loom: { title: "Loom", extension: "json", input: "pieces", holds: "all", write: writeLoom },
  mikupad: { title: "mikupad", extension: "json", input: "pieces", holds: "one", write: writeMikupad },
  sillytavern: { title: "SillyTavern", extension: "jsonl", input: "messages", holds: "swipes", write: writeTavern },
  sharegpt: {
    title: "ShareGPT", extension: "json", input: "messages", holds: "paths",
    write: (tree) => JSON.stringify(pathsOf(tree).map((path, at) => ({ id: `${at + 1}`, conversations: shareGptOf(path) })), null, 1),
  },
  messages: {
    title: "OpenAI messages", extension: "jsonl", input: "messages", holds: "paths",
    write: (tree) => pathsOf(tree).map((path) => JSON.stringify({ messages: messagesOf(path) })).join("\n"),
  },
  markdown: { title: "Markdown", extension: "md", input: "messages", holds: "one", write: writeMarkdown },
  text: { title: "Plain text", extension: "txt", input: "messages", holds: "one", write: writePlain },
};

/** What a format cannot hold of this text, as sentences; `tree` is what `write` gets, `others`: trees that are not written. */
export function lossesOf(format, tree, { others = 0 } = {}) {
  const { input, holds } = FORMATS[format];
  const paths = pathsOf(tree);
  const says = [];
  if (others) says.push(`${several(others, "other prompt is", "other prompts are")} not in it.`);
  if (paths.length > 1) {
    if (holds === "one") says.push(`Only the current text: ${several(paths.length - 1, "other branch is", "other branches are")} left out.`);
    if (holds === "paths") says.push("Each branch is a separate conversation; what they share is repeated.");
    if (holds === "swipes") {
      const lost = lostBySwipes(tree, paths);
      says.push("Other versions of an answer are swipes.");
      if (lost) says.push(`${several(lost, "branch is", "branches are")} cut: another swipe has nothing after it.`);
    }
  }
  if (input === "pieces" && tree.wasChat) says.push("The chat is written as raw text, with the control tokens of its template.");
  if (input === "messages" && !tree.isChat && !["markdown", "text"].includes(format)) says.push("The prompt is written as a message of the user.");
  const kept = { mikupad: ["memory", "author_note", "lorebook"], sillytavern: ["author_note"] }[format] ?? [];
  const lost = Object.keys(tree.parts ?? {}).filter((name) => tree.parts[name] !== null && !kept.includes(name));
  if (lost.length) says.push(`Left out: ${lost.map((name) => ({ memory: "the memory", author_note: "the author's note", lorebook: "the lorebook" })[name]).join(", ")}.`);
  says.push(format === "mikupad" ? "Seeds and settings are left out." : "Token probabilities, seeds and settings are left out.");
  return says;
}

function lostBySwipes(tree, paths) {
  const main = new Set(paths[0]);
  return paths.slice(1).filter((path) => {
    const fork = path.findIndex((node) => !main.has(node));
    return path[fork].role !== "assistant" || fork < path.length - 1;
  }).length;
}

/** Read the text of a file: `{format, trees, notes}`. Throws BadFile. */
export function readTexts(text, name = "") {
  if (text.includes("\u0000")) throw new BadFile("The file is not a text: it contains null characters.");
  const data = parseJson(text);
  const rows = data === undefined ? parseLines(text) : null;
  const result = data !== undefined ? readJson(data) : rows ? readRows(rows) : readProse(text, name);
  if (!result.trees.length) throw new BadFile("The file has no text.");
  if (result.trees.length > MAX_TREES) tooMany(result.trees.length, "texts", MAX_TREES);
  return result;
}

function readJson(data) {
  if (isOpenLoom(data)) return { format: "openloom", ...readOpenLoom(data) };
  if (isKobold(data)) return { format: "kobold", ...readKobold(data) };
  if (isMikupad(data)) return { format: "mikupad", ...readMikupad(data) };
  if (isLoom(data)) return { format: "loom", ...readLoom(data) };
  return readRows(conversationIn(data) ? [data] : Array.isArray(data) ? data : [data]);
}

function readRows(rows) {
  if (isTavern(rows)) return { format: "sillytavern", ...readTavern(rows) };
  if (isConversations(rows)) {
    const isShareGpt = rows.some((row) => (conversationIn(row) ?? []).some((item) => "from" in item));
    return { format: isShareGpt ? "sharegpt" : "messages", ...readConversations(rows) };
  }
  throw new BadFile(`The JSON is of no known kind. Known: Unspool, ${Object.values(FORMATS).slice(0, 6).map(({ title }) => title).join(", ")}.`);
}

function readProse(text, name) {
  if (/\.jsonl?$/i.test(name)) throw new BadFile("The file is not valid JSON, or it was truncated.");
  if (!text.trim()) throw new BadFile("The file is empty.");
  const tree = readMarkdown(text.replace(/\r\n?/g, "\n"));
  const plain = newTree({ title: name.replace(/\.[a-z]+$/i, "") || null, isChat: false, children: [newNode("user", text)] });
  return { format: tree ? "markdown" : "text", trees: [tree ?? plain], notes: [] };
}

function parseJson(text) {
  try {
    const data = JSON.parse(text);
    return isObject(data) || Array.isArray(data) ? data : undefined;
  } catch {
    return undefined;
  }
}

/** JSON Lines: the objects, or null if the first line is none. */
function parseLines(text) {
  const lines = text.split("\n");
  const rows = [];
  for (let at = 0; at < lines.length; at += 1) {
    if (!lines[at].trim()) continue;
    const row = parseJson(lines[at]);
    if (row === undefined && !rows.length) return null;
    if (row === undefined) throw new BadFile(`Invalid file: line ${at + 1} is not valid JSON, or the file was truncated.`);
    rows.push(row);
  }
  return rows.length > 1 ? rows : null;
}

// -- branches of the page as a tree ------------------------------------------------------------------

const CONTROL = /^[<[].+[>\]]$/s;

/**
 * The tree of branches with one prompt. `branches`: those of the page with their steps, the current one first. `input` is
 * that of a format: with "pieces" a chat is raw text with its control tokens.
 */
export function treeOf(branches, input) {
  const [{ prompt, model, name }] = branches;
  const wasChat = Boolean(prompt.messages);
  const isChat = wasChat && input !== "pieces";
  const tree = newTree({ title: name ?? null, isChat, wasChat, model });
  let start = tree;
  const head = isChat
    ? prompt.messages.map(({ role, content }) => newNode(ROLES[role] ?? role, messageText(content)))
    : [newNode("user", prompt.text)];
  for (const node of head) {
    start.children.push(node);
    start = node;
  }
  for (const branch of branches) insertSteps(start, itemsOf(branch, isChat, wasChat));
  setTexts(start);
  const isMessages = input === "messages" || (input === "both" && isChat);
  return isMessages ? asMessages(tree) : tree;
}

const messageText = (content) => (typeof content === "string" ? content
  : list(content).map((part) => ownValue(part, "text") ?? "").join(""));

/** Steps with the text that they contribute: `{token, role, isStart, text, step}`. */
function itemsOf(branch, isChat, wasChat) {
  const { steps } = branch;
  const start = promptLength(branch);
  const template = new Set(steps.flatMap((_, at) => (isChat && isTemplate(branch, start + at) ? [at] : [])));
  let role = "assistant";
  return steps.map((step, at) => {
    const isStart = template.has(at) && !template.has(at - 1);
    if (isStart) role = isUserTurn(steps, template, at) ? "user" : "assistant";
    const isControl = !step.text && wasChat && !isChat && CONTROL.test(step.piece);
    return { token: step.token, role, isStart, text: template.has(at) ? "" : isControl ? step.piece : step.text, step };
  });
}

/** Whether the template tokens from `at` on open a turn of the user: chosen words, and template tokens after them. */
function isUserTurn(steps, template, at) {
  let word = at;
  while (template.has(word)) word += 1;
  let end = word;
  while (end < steps.length && steps[end].chosen && !template.has(end)) end += 1;
  return end > word && template.has(end);
}

/** Add steps below a node, splitting nodes where texts diverge. */
function insertSteps(start, items) {
  let [node, at] = [start, 0];
  while (at < items.length) {
    const next = node.children.find((child) => child.items[0].token === items[at].token && child.items[0].isStart === items[at].isStart);
    if (!next) {
      for (; at < items.length; node = node.children.at(-1)) {
        let end = at + 1;
        while (end < items.length && !items[end].isStart) end += 1;
        node.children.push(newNode(items[at].role, "", { items: items.slice(at, end), isStart: at === 0 || items[at].isStart }));
        at = end;
      }
      return;
    }
    let shared = 0;
    while (shared < next.items.length && at + shared < items.length && next.items[shared].token === items[at + shared].token) shared += 1;
    if (shared < next.items.length) {
      const tail = newNode(next.role, "", { items: next.items.splice(shared), children: next.children, isStart: false });
      next.children = [tail];
    }
    [node, at] = [next, at + shared];
  }
}

function setTexts(start) {
  const todo = [...start.children];
  while (todo.length) {
    const node = todo.pop();
    node.text = node.items.map(({ text }) => text).join("");
    node.steps = node.items.map(({ step, text }) => ({
      text, chosen: step.chosen, probability: step.logprob === null ? 0 : Math.exp(step.logprob),
      candidates: step.candidates.map((item) => ({ tok_str: item.text, prob: item.logprob === null ? 0 : Math.exp(item.logprob) })),
    }));
    delete node.items;
    todo.push(...node.children);
  }
}

/** The same texts with one node for each message; branches that fork inside a message get the whole message each. */
function asMessages(tree) {
  const result = { ...tree, children: [] };
  for (const path of pathsOf(tree)) {
    const messages = [];
    for (const node of path) {
      if (node.isStart === false) messages.at(-1).text += node.text;
      else messages.push({ role: node.role, text: node.text });
    }
    const last = messages.at(-1);
    addConversation(result, last.role === "assistant" && !last.text ? messages.slice(0, -1) : messages);
  }
  return result;
}

/** A chat as plain text with names, for a model without a chat template. */
export function asPlain(tree) {
  const plain = newTree({ ...tree, isChat: false, children: [] });
  const todo = [[tree, plain]];
  while (todo.length) {
    const [node, copy] = todo.pop();
    for (const child of node.children) {
      copy.children.push(newNode(child.role, `${roleTitle(child.role)}: ${child.text}\n\n`));
      todo.push([child, copy.children.at(-1)]);
    }
  }
  return plain;
}
