// The library: all sessions, to search, open, rename, tag, duplicate and delete.

import { attempt, newText, showPanel, toggleLibrary } from "../actions.js";
import { html, isNarrow, plural, RequestError, useChanges, useEffect, useRef, useRequest, useState } from "../lib.js";
import { state } from "../state.js";
import { deleteSession, duplicateSession, listSessions, openSession, restoreSession, updateSession } from "./sessions.js";

const PAGE = 50;
const WAIT_MS = 150; // after the last key in the search field

export function Library() {
  useChanges("session", "writing", "server");
  const [query, setQuery] = useState("");
  const [tag, setTag] = useState(null);
  const [turn, setTurn] = useState(0); // grows with each change made here
  const [older, setOlder] = useState([]); // further pages of the list
  const [deleted, setDeleted] = useState(null);
  const isWriting = state.writing !== null;
  const { answer, fault, again } = useRequest(
    async (signal) => {
      const page = await listSessions({ query, tag, limit: PAGE }, { signal });
      setOlder([]);
      return page;
    },
    query ? WAIT_MS : 0, [query, tag, turn, state.session, isWriting, state.server.ready]);
  const pages = answer ? [answer, ...older] : [];
  const sessions = pages.flatMap(({ data }) => data);
  const tags = [...new Set([...(tag ? [tag] : []), ...sessions.flatMap((session) => session.tags)])];
  const refresh = () => setTurn((n) => n + 1);
  const loadMore = () => attempt(async () => {
    const page = await listSessions({ query, tag, limit: PAGE, before: sessions.at(-1).id });
    setOlder((before) => [...before, page]);
  });
  const remove = (session) => attempt(async () => {
    await deleteSession(session.id);
    if (state.session === session.id) await newText();
    setDeleted(session);
    refresh();
  });
  const putBack = () => attempt(async () => {
    await restoreSession(deleted.id);
    setDeleted(null);
    refresh();
  });
  const onKey = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    toggleLibrary(false);
    document.getElementById("library-button")?.focus();
  };
  return html`<section class="library panel" aria-label="Library" onKeyDown=${onKey}>
    <div class="row spread"><h2>Library</h2>
      <button type="button" class="button tiny plain" aria-label="Close the library" onClick=${() => toggleLibrary(false)}>×</button></div>
    <input class="field" type="search" id="library-search" value=${query} placeholder="Search"
      aria-label="Search the library" onInput=${(event) => setQuery(event.target.value)} />
    ${tags.length > 0 && html`<div class="row library-tags" role="group" aria-label="Tags">${tags.map((name) => html`<button type="button"
      class="chip" key=${name} aria-pressed=${tag === name} onClick=${() => setTag(tag === name ? null : name)}>${name}</button>`)}</div>`}
    <div role="status">${deleted && html`<p class="row spread small library-deleted"><span>Deleted “${deleted.title || "Untitled"}”.</span>
      <button type="button" class="button tiny" onClick=${putBack}>Undo</button></p>`}</div>
    <${RequestError} fault=${fault} again=${again} />
    ${answer && !answer.is_saved && html`<p class="quiet small">These texts are not saved: they are lost when the server stops.</p>`}
    ${answer && !sessions.length && html`<p class="quiet small">${query || tag ? "No text matches." : "No texts yet. Every text you write is kept here."}</p>`}
    <ul class="library-list">${sessions.map((session) => html`<${Item} key=${session.id} session=${session} refresh=${refresh} remove=${remove} />`)}</ul>
    ${pages.at(-1)?.has_more && html`<button type="button" class="button" onClick=${loadMore}>Older texts</button>`}
  </section>`;
}

function Item({ session, refresh, remove }) {
  const [isEditing, setEditing] = useState(false);
  const { id, title, tags, preview, branches, tokens, updated } = session;
  const isOpen = id === state.session;
  const open = async () => {
    if (isNarrow()) toggleLibrary(false);
    if (!isOpen) await openSession(id);
    if (branches > 1 && !isNarrow()) showPanel("branches"); // the map of the session
  };
  const name = title || "Untitled";
  if (isEditing) {
    return html`<li class="library-item"><${EditForm} session=${session} close=${(changed) => {
      setEditing(false);
      if (changed) refresh();
    }} /></li>`;
  }
  return html`<li class=${`library-item ${isOpen ? "open" : ""}`} data-session=${id}>
    <button type="button" class="library-open" aria-current=${isOpen ? "true" : null} onClick=${open}>
      <b dir="auto">${name}</b><span class="quiet small" dir="auto">${preview}</span>
      <span class="quiet small">${whenText(updated)} · ${plural(tokens, "token")}${branches > 1 ? ` · ${plural(branches, "branch", "branches")}` : ""}${
        tags.map((tag) => ` · #${tag}`).join("")}</span></button>
    <span class="library-acts">
      <button type="button" class="button tiny plain" aria-label=${`Rename or tag ${name}`} title="Rename or tag" onClick=${() => setEditing(true)}>Rename</button>
      <button type="button" class="button tiny plain" aria-label=${`Duplicate ${name}`} title="Duplicate, with all branches"
        onClick=${() => attempt(async () => { await duplicateSession(id); refresh(); })}>Duplicate</button>
      <button type="button" class="button tiny plain" aria-label=${`Delete ${name}`} onClick=${() => remove(session)}>Delete</button>
    </span>
  </li>`;
}

function EditForm({ session, close }) {
  const form = useRef();
  useEffect(() => form.current.elements.title.select(), []);
  const submit = (event) => {
    event.preventDefault();
    const { title, tags } = form.current.elements;
    const list = tags.value.split(",").map((tag) => tag.trim()).filter(Boolean);
    attempt(async () => {
      await updateSession(session.id, { title: title.value.trim() || null, tags: list });
      close(true);
    });
  };
  const leave = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close(false);
  };
  return html`<form ref=${form} class="stack" onSubmit=${submit} onKeyDown=${leave}>
    <label class="small">Title<input class="field" name="title" maxlength="200" autocomplete="off" defaultValue=${session.title} /></label>
    <label class="small">Tags, with commas between<input class="field" name="tags" autocomplete="off" defaultValue=${session.tags.join(", ")} /></label>
    <div class="row"><button class="button tiny">Save</button><button type="button" class="button tiny plain" onClick=${() => close(false)}>Cancel</button></div>
  </form>`;
}

const DAY_S = 86_400;

/** The time of day for today, else the date. */
function whenText(seconds) {
  const when = new Date(seconds * 1000);
  return Date.now() / 1000 - seconds < DAY_S && when.getDate() === new Date().getDate()
    ? when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : when.toLocaleDateString();
}
