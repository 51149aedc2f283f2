"""Files of other programs, written by hand after the code of these programs."""

from __future__ import annotations

import json
from typing import Any


def lines(*rows: Any) -> str:
    """Return JSON Lines."""
    return "\n".join(json.dumps(row) for row in rows)


# SillyTavern/SillyTavern, public/script.js (saveChat, saveReply): header, then a message a line.
TAVERN = lines(
    {"user_name": "You", "character_name": "Seraphina", "create_date": "2024-10-09@17h21m53s",
     "chat_metadata": {"note_prompt": "", "note_interval": 1}},
    {"name": "Seraphina", "is_user": False, "is_system": False, "send_date": "October 9",
     "mes": "*You wake.* Hello!", "extra": {}, "swipe_id": 0, "swipes": ["*You wake.* Hello!"]},
    {"name": "You", "is_user": True, "is_system": False, "send_date": "October 9, 2024 5:22pm",
     "mes": "Where am I?", "extra": {}, "force_avatar": "User Avatars/user.png"},
    {"name": "Seraphina", "is_user": False, "send_date": "October 9, 2024 5:22pm",
     "mes": "In the glade.", "extra": {"api": "koboldcpp", "model": "x"}, "swipe_id": 1,
     "swipes": ["In a forest.", "In the glade.", "Safe."],
     "swipe_info": [{"send_date": "x", "extra": {}}] * 3},
    {"name": "Seraphina", "is_user": False, "is_system": True, "mes": "hidden", "extra": {}},
    {"name": "You", "is_user": True, "is_system": False, "send_date": "x", "mes": "Thanks!"},
)  # fmt: skip
# lmg-anon/mikupad, mikupad.html (exportSession): each value of the session is JSON in a string.
MIKUPAD: dict[str, str] = {
    "name": '"MikuPad #2"', "endpointAPI": "2", "temperature": "0.7", "seed": "-1",
    "memoryTokens": json.dumps({"contextOrder": "{memPrefix}{prompt}", "prefix": "", "text": "x"}),
    "prompt": json.dumps([
        {"type": "user", "content": "Once upon"},
        {"content": " a", "prob": 0.5, "completion_probabilities": [
            {"content": " a", "probs": [{"tok_str": " a", "prob": 0.5}]}]},
        {"content": " time"},
        {"type": "user", "content": ", said I"},
    ]),
}  # fmt: skip
# socketteer/loom, util/util_tree.py (new_node) and model.py (EMPTY_TREE, set_generated_nodes).
LOOM: dict[str, Any] = {
    "root": {"mutable": False, "visited": True, "text": "", "id": "r", "open": True, "children": [
        {"text": "", "id": "a", "parent_id": "r", "children": [
            {"text": "The sea", "id": "b", "parent_id": "a", "mutable": True, "children": [
                {"text": " was calm.", "id": "c", "parent_id": "b", "children": [],
                 "meta": {"source": "AI"}, "generation": {"id": "g", "index": 0}},
                {"text": " rose.", "id": "d", "parent_id": "b", "children": []}]}]}]},
    "selected_node_id": "c", "chapters": {}, "tags": {"bookmark": {}},
}  # fmt: skip
# rocketbro/rocketbro.github.io, projects/openloom: LoomTree and Node, version 1.0.
OPENLOOM: dict[str, Any] = {
    "id": "t", "title": "A talk", "description": None, "lastModified": "2024-05-01T00:00:00Z",
    "systemMessage": "Be brief.", "rootNodeId": "1", "currentNodeId": "3", "bookmarkedNodes": {},
    "nodes": {
        "1": {"id": "1", "text": "Hi", "author": "user", "modelId": "User", "parentId": None,
              "childrenIds": ["2", "3"], "rememberedChildId": "3", "isBookmarked": False},
        **{n: {"id": n, "text": words, "author": "assistant", "parentId": "1", "childrenIds": []}
           for n, words in (("2", "Hello."), ("3", "Yes?"))},
    },
}  # fmt: skip
# Open Loom 2.0 as Aspen Grove writes it: blocks of content, and edges.
OPENLOOM_2: dict[str, Any] = {
    "format": "open-loom", "version": "2.0", "generator": {"name": "Aspen Grove"}, "trees": [{
        "id": "t", "title": "A talk", "systemContext": "Be brief.", "rootNodeIds": ["1"],
        "nodes": {
            "1": {"id": "1", "author": {"role": "human"},
                  "content": [{"type": "text", "text": "Hi"}]},
            "2": {"id": "2", "author": {"role": "model"},
                  "content": [{"type": "text", "text": "Hello."}]},
            "3": {"id": "3", "author": {"role": "model"},
                  "content": [{"type": "text", "text": "Yes?"}, {"type": "image", "ref": "x"}]},
        },
        "edges": [{"type": "continuation", "targetNodeId": n,
                   "sources": [{"nodeId": "1", "role": "primary"}]} for n in "23"],
    }],
}  # fmt: skip
