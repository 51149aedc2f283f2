"""Texts in files that other programs read and write, for `unspool sessions import` and `export`.

| format   | file                                                        |
|----------|-------------------------------------------------------------|
| messages | OpenAI messages: JSON lines, `{"messages": [...]}`          |
| sharegpt | ShareGPT: a JSON list of `{"conversations": [...]}`         |
| markdown | a heading for each turn, such as `## user`                  |
| text     | plain text                                                  |

Those that hold several versions of a text are in `looms.py`. The page opens and writes the same
formats (`page/code/share/formats.js`), and Unspool's own with all steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import UnspoolError
from unspool.store.looms import (
    TextTree,
    read_trees,
    tree_of_chats,
    tree_of_texts,
    write_loom,
    write_mikupad,
    write_openloom,
    write_sillytavern,
)

SUFFIXES = {".jsonl": "messages", ".json": "sharegpt", ".md": "markdown", ".txt": "text"}
_TREE_WRITERS = {
    "openloom": write_openloom,
    "loom": write_loom,
    "mikupad": write_mikupad,
    "sillytavern": write_sillytavern,
}
FORMATS = (*sorted({*SUFFIXES.values()}), *_TREE_WRITERS)
MAX_FILE_BYTES = 64 << 20
MAX_TEXTS = 200  # of a file
_ROLES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "chatgpt": "assistant", "developer": "system", "tool": "user", "function": "user",
}  # fmt: skip
_SHAREGPT_ROLES = {"user": "human", "assistant": "gpt"}
_HEADING = re.compile(r"## (system|user|assistant)[ \t]*", re.IGNORECASE)
_ESCAPED_HEADING = re.compile(r"\\*## ")
_ELSEWHERE = (
    "; known: OpenAI messages, ShareGPT, OpenLoom, loom, mikupad, SillyTavern, Markdown and text"
)

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class PortableText:
    """A text without its tokens: a conversation, or a plain text."""

    title: str | None
    text: str  # "" for a conversation
    messages: Messages | None = None

    def describe(self) -> str:
        """Return it as plain text."""
        if self.messages is None:
            return self.text
        return "\n\n".join(f"{item['role']}: {item['content']}" for item in self.messages)


def write_texts(texts: Sequence[PortableText], kind: str) -> str:
    """Return the texts of a session as a file of a format."""
    if kind in _TREE_WRITERS:
        return _TREE_WRITERS[kind](_tree_of(texts, has_roles=kind == "sillytavern")) + "\n"
    if kind == "messages":
        rows = [{"messages": _messages(text)} for text in texts]
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if kind == "sharegpt":
        entries = [
            {
                "id": str(number),
                "conversations": [
                    {
                        "from": _SHAREGPT_ROLES.get(item["role"], item["role"]),
                        "value": item["content"],
                    }
                    for item in _messages(text)
                ],
            }
            for number, text in enumerate(texts, start=1)
        ]
        return json.dumps(entries, ensure_ascii=False, indent=1) + "\n"
    if kind == "markdown":
        if len(texts) > 1:
            raise UnspoolError(
                f"a Markdown file holds one text, and the session has {len(texts)}; use "
                "--format messages, or --branch"
            )
        return _write_markdown(texts[0])
    return "\n\n".join(text.describe() for text in texts) + "\n"


def _tree_of(texts: Sequence[PortableText], *, has_roles: bool) -> TextTree:
    """The texts of a session as a tree; with `has_roles` a plain text is a message of the user."""
    title = texts[0].title
    if has_roles or all(text.messages for text in texts):
        paths = ([(item["role"], item["content"]) for item in _messages(text)] for text in texts)
        return tree_of_chats(title, paths)
    return tree_of_texts(title, [text.describe() for text in texts])


def _texts_of(tree: TextTree) -> list[PortableText]:
    """The texts of a tree: a session."""
    if tree.is_chat:
        return [
            PortableText(tree.title, "", [{"role": role, "content": text} for role, text in path])
            for path in tree.paths()
        ]
    return [PortableText(tree.title, "".join(text for _, text in path)) for path in tree.paths()]


def _messages(text: PortableText) -> Messages:
    return text.messages or [{"role": "user", "content": text.text}]


def _write_markdown(text: PortableText) -> str:
    if text.messages is None:
        return text.text
    parts = [f"# {text.title}\n"] if text.title else []
    for item in text.messages:
        lines = [
            f"\\{line}" if _ESCAPED_HEADING.match(line) else line
            for line in item["content"].split("\n")
        ]
        parts.append("## {}\n\n{}\n".format(item["role"], "\n".join(lines)))
    return "\n".join(parts)


def read_file(path: Path) -> list[list[PortableText]]:
    """Read the sessions of a file, each with its texts; its content says which format it has.

    Raises:
        UnspoolError: The file cannot be read, or has another format.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UnspoolError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MB")
        content = path.read_bytes()
    except OSError as error:
        raise UnspoolError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        sessions = read_texts(content, path.stem if path.suffix in SUFFIXES else path.name)
    except UnspoolError as error:
        raise UnspoolError(f"{path}: {error}") from None
    if (number := sum(map(len, sessions))) > MAX_TEXTS:
        raise UnspoolError(f"{path} has {number:,} texts; at most {MAX_TEXTS} can be imported")
    return sessions


def read_texts(content: bytes, title: str) -> list[list[PortableText]]:
    """Return the sessions of a file's content; `title` is that of a plain text."""
    if content.startswith(b"\x1f\x8b"):
        raise UnspoolError(f"compressed files are not supported{_ELSEWHERE}")
    try:
        words = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnspoolError("the file is not UTF-8 text") from None
    if not words.strip():
        raise UnspoolError("the file is empty")
    if "\0" in words:
        raise UnspoolError("the file is not a text: it has null characters")
    rows = _json_rows(words)
    if rows is not None:
        trees = read_trees(rows[0] if len(rows) == 1 else rows)
        sessions = [_texts_of(tree) for tree in trees or ()]
        if trees is None:
            sessions = [[text] for text in _read_conversations(rows)]
        if not any(sessions):
            raise UnspoolError("the file has no text")
        return [texts for texts in sessions if texts]
    words = words.replace("\r\n", "\n").replace("\r", "\n")
    return [[_read_markdown(words) or PortableText(title, words)]]


def _json_rows(words: str) -> list[Any] | None:
    """The entries of a JSON or JSON Lines file; None: it is another text."""
    if words.lstrip()[0] not in "{[":
        return None
    try:
        try:
            data = json.loads(words)
        except json.JSONDecodeError:
            lines = [line for line in words.splitlines() if line.strip()]
            return [json.loads(line) for line in lines] if len(lines) > 1 else None
    except json.JSONDecodeError as error:
        if words.lstrip()[0] == "[" or not words.lstrip().startswith('{"'):
            return None
        raise UnspoolError(f"a line is not valid JSON, or the file was cut: {error}") from None
    except RecursionError:
        raise UnspoolError(f"the JSON is nested too deeply{_ELSEWHERE}") from None
    return [data] if isinstance(data, dict) or _messages_in(data) else list(data)


def _messages_in(row: Any) -> list[dict[str, Any]]:
    """The messages of an entry; none if it has none."""
    candidates = [row.get("conversations"), row.get("messages")] if isinstance(row, dict) else [row]
    for value in candidates:
        if isinstance(value, list) and all(
            isinstance(item, dict) and ("role" in item or "from" in item) for item in value
        ):
            return value
    return []


def _read_conversations(rows: Sequence[Any]) -> list[PortableText]:
    texts = []
    for number, row in enumerate(rows, start=1):
        items = _messages_in(row)
        if not items:
            raise UnspoolError(f"entry {number} has no messages or conversations{_ELSEWHERE}")
        system = row.get("system") if isinstance(row, dict) else None
        messages = [{"role": "system", "content": _text(system, f"system of entry {number}")}]
        messages = messages if system else []
        for at, item in enumerate(items, start=1):
            where = f"message {at} of entry {number}"
            content = item.get("content") if "content" in item else item.get("value")
            if isinstance(content, list):
                parts = [part.get("text") for part in content if isinstance(part, dict)]
                content = "".join(_text(part, where) for part in parts)
            messages.append({"role": _role(item, where), "content": _text(content, where)})
        texts.append(PortableText(None, "", messages))
    return texts


def _role(item: dict[str, Any], where: str) -> str:
    name = item.get("role") or item.get("from")
    role = _ROLES.get(str(name).lower(), str(name).lower())
    if role not in ("system", "user", "assistant"):
        raise UnspoolError(f"{where} has the role {name!r:.60}; known: system, user, assistant")
    return role


def _text(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnspoolError(f"{where} must be a text, got {value!r:.60}")
    return value


def _read_markdown(words: str) -> PortableText | None:
    """The turns under headings such as `## user`; None: it is another text."""
    title: str | None = None
    turns: list[tuple[str, list[str]]] = []
    for line in words.split("\n"):
        heading = _HEADING.fullmatch(line)
        if heading:
            turns.append((heading[1].lower(), []))
        elif turns:
            is_escaped = line.startswith("\\") and _ESCAPED_HEADING.match(line[1:])
            turns[-1][1].append(line[1:] if is_escaped else line)
        elif line.startswith("# "):
            title = line[2:].strip()
        elif line.strip():
            return None
    messages = [{"role": role, "content": "\n".join(lines).strip("\n")} for role, lines in turns]
    return PortableText(title, "", messages) if messages else None
