"""Read and change sessions in a state folder without a server: for the command line."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import UnspoolError
from unspool.store.database import Connection, join_steps
from unspool.store.formats import Messages, PortableText


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session in a list."""

    id: str
    title: str
    tags: list[str]
    model: str
    branches: int
    tokens: int  # of the longest branch, prompt included
    updated: float


@dataclass(frozen=True, slots=True)
class StoredText:
    """The text of one branch."""

    branch: str
    name: str | None
    prompt: str
    messages: Messages | None  # of a conversation: all turns, with those of the generated part
    text: str  # the generated part

    def portable(self, title: str | None) -> PortableText:
        if self.messages is None:
            return PortableText(title, self.prompt + self.text)
        return PortableText(title, "", self.messages)


@contextlib.contextmanager
def open_library(folder: Path) -> Iterator[Connection]:
    """Open the database of a folder for reading, also while a server uses it."""
    path = folder / "texts.db"
    if not path.exists():
        raise UnspoolError(f"there are no stored texts in {folder}")
    try:
        db = Connection.open(path, readonly=True)
    except sqlite3.Error as error:
        raise UnspoolError(f"{path} cannot be read: {error}") from error
    try:
        yield db
    except sqlite3.Error as error:
        raise UnspoolError(f"{path} cannot be read: {error}") from error
    finally:
        db.close()


def list_sessions(db: Connection) -> list[StoredSession]:
    """Return all sessions, the newest first."""
    lengths = dict(db.rows("SELECT branch, max(start+count) FROM parts GROUP BY branch"))
    branches: dict[str, list[tuple[str, dict[str, Any], int]]] = {}
    for number, session, model, state in db.rows(
        "SELECT number, session, model, state FROM branches WHERE deleted IS NULL ORDER BY number"
    ):
        branches.setdefault(session, []).append((model, json.loads(state), lengths.get(number, 0)))
    sessions = []
    for identity, title, tags, updated in db.rows(
        "SELECT id, title, tags, updated FROM sessions WHERE deleted IS NULL"
    ):
        members = branches.get(identity, [])
        sessions.append(
            StoredSession(
                identity,
                title if title is not None else members[0][1]["title"] if members else "",
                tags.split("\n") if tags else [],
                members[-1][0] if members else "",
                len(members),
                max((state["prompt_tokens"] + count for _, state, count in members), default=0),
                max([updated, *(state["updated"] for _, state, _ in members)]),
            )
        )
    return sorted(sessions, key=lambda session: session.updated, reverse=True)


def find_session(db: Connection, name: str | None) -> StoredSession:
    """Return the session with this id, or a unique start of it; None: the newest."""
    sessions = list_sessions(db)
    matches = [s for s in sessions if name is None or s.id.startswith((name, f"session-{name}"))]
    if not matches:
        raise UnspoolError(
            f"there is no session {name!r}; unspool sessions lists them"
            if name is not None
            else "there is no session yet"
        )
    if name is not None and len(matches) > 1 and matches[0].id != name:
        raise UnspoolError(f"{name!r} is the start of {len(matches)} sessions; give more of the id")
    return matches[0]


def texts_of(db: Connection, session: str) -> list[StoredText]:
    """Return the texts of a session, the oldest branch first."""
    texts = []
    for number, identity, name, state, data in db.rows(
        "SELECT number, id, name, state, data FROM branches JOIN prompts ON prompt=hash "
        "WHERE session=? AND deleted IS NULL ORDER BY number",
        (session,),
    ):
        prompt = json.loads(zlib.decompress(data))
        steps = [step.text for step in join_steps(db.read_steps(number))]
        turns = json.loads(state).get("turns", [])
        messages = prompt["messages"] and join_turns(prompt["messages"], steps, turns)
        texts.append(StoredText(identity, name, prompt["text"], messages, "".join(steps)))
    return texts


def join_turns(
    messages: Sequence[dict[str, Any]], steps: Sequence[str], turns: Sequence[Sequence[Any]]
) -> Messages:
    """Return all turns of a conversation.

    Args:
        messages: Those of the prompt.
        steps: The texts of the steps after it.
        turns: Messages within the steps that the model did not write: role, first and last step,
            first and last step of the content.
    """
    joined = []
    for item in messages:
        content = item.get("content") or ""
        if not isinstance(content, str):
            content = "".join(str(part.get("text") or "") for part in content)
        joined.append({"role": str(item.get("role")), "content": content})
    at = 0
    for role, first, last, begin, end in turns:
        joined.append({"role": "assistant", "content": "".join(steps[at:first])})
        joined.append({"role": role, "content": "".join(steps[begin:end])})
        at = last
    return [*joined, {"role": "assistant", "content": "".join(steps[at:])}]


def delete_session(folder: Path, session: str) -> None:
    """Mark a session and its branches as deleted; a server removes them after a day."""
    when = time.time()
    db = Connection.open(folder / "texts.db")
    try:
        db.run("BEGIN IMMEDIATE")
        db.update("sessions", session, {"deleted": when})
        db.run("UPDATE branches SET deleted=? WHERE session=? AND deleted IS NULL", (when, session))
        db.run("COMMIT")
    finally:
        db.close()
