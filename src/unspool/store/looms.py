"""Files that hold several versions of a text: looms, mikupad and SillyTavern.

| format      | file                                                                             |
|-------------|----------------------------------------------------------------------------------|
| openloom    | OpenLoom 1.0 (rocketbro) and Open Loom 2.0 (Aspen Grove): nodes by id             |
| loom        | socketteer/loom: nested nodes                                                    |
| mikupad     | lmg-anon/mikupad: a session, or all of them; one version                          |
| sillytavern | SillyTavern chats: JSON lines; other versions of an answer are swipes            |

A text is a path: its pieces with their roles, from the start to the end. Paths that begin alike
share nodes. Nothing here recurses: a file may be nested deeply.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.errors import UnspoolError

MAX_NODES = 5000  # of a file
TextPath = list[tuple[str, str]]  # roles and texts
_AUTHORS = {"human": "user", "model": "assistant", "mixed": "assistant"}


@dataclass(slots=True)
class TextNode:
    """A piece of a text, and what may follow it."""

    role: str
    text: str
    children: list[TextNode] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TextTree:
    """Versions of one text. In a chat each node is a message."""

    title: str | None
    is_chat: bool
    children: list[TextNode]

    def paths(self) -> list[TextPath]:
        """Return every path to a leaf, in order."""
        paths: list[TextPath] = []
        path: TextPath = []
        todo = [(node, 0) for node in reversed(self.children)]
        while todo:
            node, depth = todo.pop()
            path[depth:] = [(node.role, node.text)]
            if not node.children:
                paths.append(list(path))
            todo += [(child, depth + 1) for child in reversed(node.children)]
        return paths


def tree_of_chats(title: str | None, paths: Iterable[TextPath]) -> TextTree:
    """Return conversations as one tree; messages that they share are there once."""
    root = TextNode("", "")
    for path in paths:
        node = root
        for role, text in path:
            child = next((c for c in node.children if (c.role, c.text) == (role, text)), None)
            if child is None:
                child = TextNode(role, text)
                node.children.append(child)
            node = child
    return TextTree(title, True, root.children)


def tree_of_texts(title: str | None, texts: Iterable[str]) -> TextTree:
    """Return plain texts as one tree: a node ends where texts part."""
    root = TextNode("", "")
    for text in texts:
        node, rest = root, text
        while rest:
            child = next((c for c in node.children if c.text[0] == rest[0]), None)
            if child is None:
                node.children.append(TextNode("assistant", rest))
                break
            common = num_common([child.text, rest])
            if common < len(child.text):
                tail = TextNode("assistant", child.text[common:], child.children)
                child.text, child.children = child.text[:common], [tail]
            node, rest = child, rest[common:]
    return TextTree(title, False, root.children)


def num_common(texts: Sequence[str]) -> int:
    """Return how many first characters texts have in common."""
    return len(os.path.commonprefix(texts))  # noqa: RUF071  characters are meant


# -- writing ---------------------------------------------------------------------------------------


def write_openloom(tree: TextTree) -> str:
    """Return a tree as an OpenLoom file."""
    top, system = tree.children, ""
    if len(top) == 1 and top[0].role == "system":
        top, system = top[0].children, top[0].text
    # The format has one root: several first messages become children of an empty one.
    start = top[0] if len(top) == 1 else TextNode("system", "", top)
    nodes: dict[str, dict[str, Any]] = {}
    todo: list[tuple[TextNode, str | None]] = [(start, None)]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    while todo:
        node, parent = todo.pop()
        name = f"node-{len(nodes) + 1}"
        nodes[name] = {
            "id": name, "text": node.text, "author": node.role, "modelId": "", "createdTime": now,
            "parentId": parent, "childrenIds": [], "rememberedChildId": None,
            "isBookmarked": False, "bookmarkTitle": None,
        }  # fmt: skip
        if parent is not None:
            nodes[parent]["childrenIds"].append(name)
            nodes[parent]["rememberedChildId"] = nodes[parent]["childrenIds"][0]
        todo += [(child, name) for child in reversed(node.children)]
    last = "node-1"
    while nodes[last]["childrenIds"]:
        last = nodes[last]["childrenIds"][0]
    file = {
        "id": "tree-1", "title": tree.title or "Unspool", "description": None,
        "lastModified": now, "systemMessage": system, "rootNodeId": "node-1",
        "currentNodeId": last, "nodes": nodes, "bookmarkedNodes": {},
        **({} if tree.is_chat else {"mode": "plain"}),
    }  # fmt: skip
    return json.dumps(file, ensure_ascii=False)


def write_loom(tree: TextTree) -> str:
    """Return a tree as a file of socketteer/loom; a chat has its roles in the texts."""
    root: dict[str, Any] = {"id": "1", "text": "", "children": [], "mutable": False}
    todo, number = [(child, root) for child in reversed(tree.children)], 1
    while todo:
        node, parent = todo.pop()
        number += 1
        text = f"{node.role}: {node.text}\n\n" if tree.is_chat else node.text
        copy = {
            "id": str(number), "parent_id": parent["id"], "text": text, "children": [],
            "mutable": True, "visited": True,
        }  # fmt: skip
        parent["children"].append(copy)
        todo += [(child, copy) for child in reversed(node.children)]
    selected = root["children"][0]["id"] if root["children"] else "1"
    try:
        return json.dumps({"root": root, "selected_node_id": selected}, ensure_ascii=False)
    except RecursionError:
        raise UnspoolError("the session has too many turns for this format") from None


def write_mikupad(tree: TextTree) -> str:
    """Return the first path of a tree as a session of mikupad: its values are JSON in strings."""
    path = next(iter(tree.paths()), [])
    if tree.is_chat:
        path = [(role, f"{role}: {text}\n\n") for role, text in path]
    chunks = [
        {"type": "user", "content": text} if role == "user" else {"content": text}
        for role, text in path
    ]
    values = {"name": tree.title or "Unspool", "prompt": chunks}
    return json.dumps({name: json.dumps(value) for name, value in values.items()})


def write_sillytavern(tree: TextTree) -> str:
    """Return the first path of a chat as a file of SillyTavern; other answers are swipes."""
    name, now = tree.title or "Assistant", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    rows: list[dict[str, Any]] = [
        {"user_name": "You", "character_name": name, "create_date": now, "chat_metadata": {}}
    ]
    siblings = tree.children
    while siblings:
        node = siblings[0]
        row: dict[str, Any] = {
            "name": {"user": "You", "system": "System"}.get(node.role, name),
            "is_user": node.role == "user", "is_system": False, "send_date": now,
            "mes": node.text, "extra": {"type": "narrator"} if node.role == "system" else {},
        }  # fmt: skip
        versions = [other.text for other in siblings if other.role == "assistant"]
        if node.role == "assistant" and len(versions) > 1:
            swipe_info = [{"send_date": now, "extra": {}} for _ in versions]
            row |= {"swipe_id": 0, "swipes": versions, "swipe_info": swipe_info}
        rows.append(row)
        siblings = node.children
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# -- reading ---------------------------------------------------------------------------------------


def read_trees(data: Any) -> list[TextTree] | None:
    """Return the trees of a JSON file, or of the rows of a JSON Lines file.

    None: it is of another kind. Raises UnspoolError if it is damaged.
    """
    if isinstance(data, dict):
        if data.get("format") == "open-loom":
            return [_openloom(tree) for tree in _items(data.get("trees"))]
        if isinstance(data.get("nodes"), dict) and isinstance(data.get("rootNodeId"), str):
            return [_openloom(data)]
        if isinstance(data.get("Sessions"), list) or _is_mikupad(data):
            return _mikupad(data)
    root = data.get("root", data) if isinstance(data, dict) else data
    roots = root if isinstance(root, list) else [root]
    if roots and all(_is_loom_node(node) for node in roots):
        return [_loom(roots)]
    if roots and all(isinstance(row, dict) for row in roots) and _is_tavern(roots[0]):
        return [_tavern(roots)]
    return None


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any, place: str) -> str:
    if value is not None and not isinstance(value, str):
        raise UnspoolError(f"{place} must be a text, got {value!r:.60}")
    return value or ""


def _copy_tree(
    roots: Sequence[Any], read: Callable[[Any], tuple[str, str, Sequence[Any]]]
) -> list[TextNode]:
    """Copy nodes of a file; `read` returns the role, the text and the children of one."""
    top = TextNode("", "")
    todo = [(value, top) for value in reversed(roots)]
    size = 0
    while todo:
        value, parent = todo.pop()
        size += 1
        if not isinstance(value, dict):
            raise UnspoolError(f"a node must be an object, got {value!r:.60}")
        if size > MAX_NODES:
            raise UnspoolError(f"the file has more than {MAX_NODES:,} texts")
        role, text, children = read(value)
        node = TextNode(role, text)
        parent.children.append(node)
        todo += [(child, node) for child in reversed(children)]
    return top.children


def _is_loom_node(value: Any) -> bool:
    is_node = isinstance(value, dict) and isinstance(value.get("children"), list)
    return is_node and "messages" not in value


def _loom(roots: Sequence[Any]) -> TextTree:
    top = TextNode("", "")
    top.children = _copy_tree(
        roots, lambda node: ("assistant", _text(node.get("text"), "text"), _items(node["children"]))
        if _is_loom_node(node) else ("assistant", _text(node.get("text"), "text"), [])
    )  # fmt: skip
    todo = [top]  # a loom starts each tree with empty nodes
    while todo:
        node = todo.pop()
        while any(not child.text and child.children for child in node.children):
            node.children = [
                item
                for child in node.children
                for item in (child.children if not child.text else [child])
            ]
        node.children = [child for child in node.children if child.text]
        todo += node.children
    return TextTree(None, False, top.children)


def _openloom(tree: Any) -> TextTree:
    nodes = tree.get("nodes") if isinstance(tree, dict) else None
    if not isinstance(nodes, dict):
        raise UnspoolError("nodes must be an object")
    following: dict[Any, list[Any]] = {}
    for edge in _items(tree.get("edges")):  # 2.0
        sources = [item for item in _items(edge.get("sources")) if isinstance(item, dict)]
        parents = [s for s in sources if s.get("role") not in ("context", "instruction")] or sources
        if parents:
            following.setdefault(parents[0].get("nodeId"), []).append(edge.get("targetNodeId"))
    is_plain, used = tree.get("mode") == "plain", set[str]()

    def node_of(name: Any) -> dict[str, Any]:
        if not isinstance(name, str) or not isinstance(nodes.get(name), dict):
            raise UnspoolError(f"there is no node {name!r:.60}")
        if name in used:
            raise UnspoolError(f"node {name!r:.60} has two parents or is its own ancestor")
        used.add(name)
        return {**nodes[name], "id": name}

    def read(node: Any) -> tuple[str, str, list[Any]]:
        content, author = node.get("content"), node.get("author")
        if isinstance(content, list):
            text = "".join(_text(b.get("text"), "content") for b in content if isinstance(b, dict))
        else:
            text = _text(node.get("text"), "text")
        author = author.get("role") if isinstance(author, dict) else author
        role = _AUTHORS.get(str(author), str(author))
        if not is_plain and role not in ("system", "user", "assistant"):
            raise UnspoolError(f"author must be system, user or assistant, got {author!r:.60}")
        names = node.get("childrenIds")
        names = names if isinstance(names, list) else following.get(node["id"], [])
        return "assistant" if is_plain else role, text, [node_of(name) for name in names]

    roots = tree.get("rootNodeIds") or [tree.get("rootNodeId")]
    children = _copy_tree([node_of(name) for name in _items(roots)], read)
    if len(children) == 1 and not children[0].text and children[0].children:
        children = children[0].children  # several first messages
    system = _text(tree.get("systemMessage") or tree.get("systemContext"), "systemMessage")
    if system and not is_plain:
        children = [TextNode("system", system, children)]
    return TextTree(_text(tree.get("title"), "title") or None, not is_plain, children)


def _is_mikupad(data: dict[str, Any]) -> bool:
    prompt = data.get("prompt")
    return isinstance(prompt, str) and prompt.lstrip().startswith("[")


def _mikupad(data: dict[str, Any]) -> list[TextTree]:
    if isinstance(data.get("Sessions"), list):  # all of its database
        entries = [item for item in data["Sessions"] if isinstance(item, dict)]
        names = {
            str(item.get("key")): item.get("value")
            for item in _items(data.get("Names"))
            if isinstance(item, dict)
        }
        sessions = [
            (names.get(str(item.get("key"))), item["value"].get("prompt"))
            for item in entries
            if isinstance(item.get("value"), dict)
        ]
    else:
        try:
            prompt = json.loads(data["prompt"])
        except ValueError:
            raise UnspoolError("prompt is not valid JSON in a string") from None
        name = data.get("name")
        sessions = [(name.strip('"') if isinstance(name, str) else None, prompt)]
    trees = []
    for title, chunks in sessions:
        texts = [
            _text(chunk.get("content"), "content of a piece")
            for chunk in _items(chunks)
            if isinstance(chunk, dict)
        ]
        if any(texts):
            name = title if isinstance(title, str) else None
            trees.append(TextTree(name, False, [TextNode("assistant", "".join(texts))]))
    return trees


def _is_tavern(row: dict[str, Any]) -> bool:
    is_row = isinstance(row.get("mes"), str) or "user_name" in row or "chat_metadata" in row
    return is_row and "messages" not in row


def _tavern(rows: Sequence[dict[str, Any]]) -> TextTree:
    visible = [row for row in rows if "mes" in row and row.get("is_system") is not True]
    top = TextNode("", "")
    at, size = top, 0
    for row in visible:
        extra = row.get("extra")
        is_narrator = isinstance(extra, dict) and extra.get("type") == "narrator"
        role = "user" if row.get("is_user") else "system" if is_narrator else "assistant"
        text = _text(row["mes"], "mes")
        if at.role == role:  # characters of a group after one another
            at.text += f"\n\n{text}"
            continue
        swipes = [_text(swipe, "a swipe") for swipe in _items(row.get("swipes"))]
        size += 1 + len(swipes)
        if size > MAX_NODES:
            raise UnspoolError(f"the file has more than {MAX_NODES:,} texts")
        versions = dict.fromkeys([*swipes, text] if role == "assistant" else [text])
        nodes = [TextNode(role, version) for version in versions]
        at.children = [node for node in nodes if node.text or node.text == text]
        at = next(node for node in nodes if node.text == text)
    title = _text(rows[0].get("character_name"), "character_name") or None
    return TextTree(title, True, top.children)
