// Texts of other programs as branches: the server tokenizes and scores them, so they can be inspected and continued.

import { jump, pushUndo } from "../actions.js";
import { api } from "../api.js";
import { adopt, changed, state } from "../state.js";
import { loadParts } from "../write/parts.js";
import { pathsOf } from "./formats.js";

/**
 * A tree as prompts with what follows: `[{begin: {messages} or {prompt}, children}]`. A chat's prompt is everything before
 * the first answer that has another version or nothing after it; the rest is appended, so that branches share it.
 */
function promptsOf(tree) {
  if (!tree.isChat) {
    return tree.children.map(({ text, children }) => ({ begin: { prompt: text }, children, title: tree.title }));
  }
  const lead = [];
  let node = tree;
  while (node.children.length === 1) lead.push(node = node.children[0]);
  let kept = lead.length;
  while (kept && lead[kept - 1].role === "assistant") kept -= 1;
  if (!kept && node.children.length) { // versions of a greeting: a prompt each
    return node.children.flatMap((child) => promptsOf({ ...tree, children: [chain([...lead, child])] }));
  }
  kept ||= lead.length;
  const messages = lead.slice(0, kept).map(({ role, text }) => ({ role, content: text }));
  const children = kept === lead.length ? node.children : [lead[kept]];
  return [{ begin: { messages }, children, title: tree.title }];
}

/** Nodes after one another; the last keeps its children. */
const chain = (nodes) => nodes.reduceRight((next, node) => (next ? { ...node, children: [next] } : node), null);

/** Number of texts of trees: the unit of progress. */
export function sizeOf(trees) {
  let size = 0;
  const todo = [...trees];
  while (todo.length) {
    const { children } = todo.pop();
    size += children.length;
    todo.push(...children);
  }
  return size;
}

/**
 * Create the branches of these trees on the server, and show them. `progress(texts)` is called on the way. On an error or
 * cancellation nothing stays. Returns the number of branches.
 */
export async function importTrees(trees, { signal, progress }) {
  const records = [];
  let done = 0;
  const work = { records, signal, tick: (n) => progress(done += n), current: null };
  try {
    for (const tree of trees) {
      for (const prompt of promptsOf(tree)) await importPrompt(prompt, tree, work);
    }
  } catch (error) {
    for (const { id } of records) api.delete(`/v1/tree/${id}`).catch(() => {}); // visible nowhere yet
    throw error;
  }
  const visible = trees.find((tree) => tree.parts && (!work.current || tree.current)) ?? trees[0];
  await show(records, work.current, visible.parts);
  return records.length;
}

async function importPrompt({ begin, children, title }, tree, work) {
  const { signal } = work;
  const created = await api.post("/v1/tree", { model: state.model, name: title?.slice(0, 200) || null, ...tree.parts, ...begin }, { signal });
  const root = { id: created.id, answer: created, steps: [] };
  work.records.push(root);
  work.tick(begin.messages?.length ?? 1);
  const todo = [{ record: root, at: 0, nodes: children }];
  while (todo.length) {
    const { record, at, nodes } = todo.pop();
    const next = [];
    for (const [number, node] of nodes.entries()) {
      // The first continues in place, and the others fork.
      const target = number ? await forkRecord(record, at, work) : record;
      await appendNode(target, node, tree.isChat, signal);
      work.tick(1);
      if (node === tree.current) work.current = target;
      if (node.children.length) next.push({ record: target, at: target.steps.length, nodes: node.children });
    }
    todo.push(...next.reverse());
  }
}

async function forkRecord(record, at, { records, signal }) {
  const answer = await api.post(`/v1/tree/${record.id}/fork`, { at }, { signal });
  records.push({ id: answer.id, answer, steps: record.steps.slice(0, at), prompt: record.prompt });
  return records.at(-1);
}

async function appendNode(record, { role, text }, isChat, signal) {
  const isTurn = isChat && role !== "assistant";
  if (!text && !isTurn) return;
  const body = isTurn ? { message: { role, content: text } } : { text };
  const answer = await api.post(`/v1/tree/${record.id}/append`, body, { signal });
  record.answer = { ...record.answer, ...answer };
  record.steps.splice(answer.since, Infinity, ...answer.steps);
}

async function show(records, current, parts) {
  const before = state.current;
  for (const { answer, steps } of records) adopt({ ...answer, since: 0, steps });
  state.view = "write";
  changed("branches", "view");
  const { id } = current ?? records[0];
  await jump(id);
  loadParts(parts);
  pushUndo({ label: "import a file", before: { id: before, length: null }, after: { id, length: null } });
}
