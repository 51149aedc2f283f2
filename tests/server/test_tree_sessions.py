"""`/v1/tree/sessions`: the library of texts, and what else keeps a branch: bookmarks, undo."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tree_client import Tree


@pytest.fixture
def library(tree: Tree) -> Tree:
    for item in tree.ask("GET", "/sessions")["data"]:
        tree.ask("DELETE", f"/sessions/{item['id']}")
    return tree


def titles(tree: Tree, **params: Any) -> list[str]:
    return [item["title"] for item in tree.ask("GET", "/sessions", params=params)["data"]]


def test_a_session_has_its_branches_and_a_view(library: Tree):
    session = library.ask("POST", "/sessions", json={"tags": ["sea", "sea"], "view": {"a": [1]}})
    assert session["title"] == "" and session["branches"] == [] and session["view"] == {"a": [1]}
    branch = library.do("resume", library.new(session=session["id"], max_tokens=6))
    fork = library.ask("POST", f"/{branch['id']}/fork", json={"at": 2})
    assert branch["session"] == fork["session"] == session["id"]
    (listed,) = library.ask("GET", "/sessions")["data"]
    assert listed["title"].startswith("The old lighthouse") and listed["title"].endswith("…")
    assert listed["tags"] == ["sea"] and listed["branches"] == 2
    assert listed["tokens"] == len(branch["prompt"]["tokens"]) + 6
    assert listed["model"] == branch["model"] and listed["updated"] >= listed["created"]
    complete = library.ask("GET", f"/sessions/{session['id']}")
    assert [item["id"] for item in complete["branches"]] == [branch["id"], fork["id"]]
    assert complete["branches"][1]["parent"] == branch["id"]
    named = library.ask("PATCH", f"/sessions/{session['id']}", json={"title": "Storm"})
    assert named["title"] == "Storm" and named["tags"] == ["sea"]
    large = {"view": {"x": "y" * (2 << 20)}}
    library.ask("PATCH", f"/sessions/{session['id']}", 400, json=large)
    assert library.ask("GET", f"/sessions/{session['id']}")["view"] == {"a": [1]}
    library.ask("POST", "", 404, json={"prompt": "a", "session": "session-none"})
    assert library.new()["session"] is None


def test_sessions_are_listed_newest_first_searched_and_paged(library: Tree):
    names = [
        library.ask("POST", "/sessions", json={"title": f"Story {n}", "tags": [f"tag{n % 2}"]})
        for n in range(4)
    ]
    assert titles(library) == ["Story 3", "Story 2", "Story 1", "Story 0"]
    library.new(session=names[1]["id"], prompt="A giraffe walks in")
    assert titles(library) == ["Story 1", "Story 3", "Story 2", "Story 0"]
    library.ask("PATCH", f"/sessions/{names[0]['id']}", json={"view": {"at": 1}})
    first = library.ask("GET", "/sessions", params={"limit": 2})
    assert [item["title"] for item in first["data"]] == ["Story 1", "Story 3"]
    assert first["has_more"]
    rest = library.ask("GET", "/sessions", params={"before": first["data"][1]["id"]})
    assert [item["title"] for item in rest["data"]] == ["Story 2", "Story 0"]
    assert not rest["has_more"]
    assert titles(library, tag="tag0") == ["Story 2", "Story 0"]
    assert titles(library, query="GIRAFFE walks") == ["Story 1"]
    assert titles(library, query="story 2") == ["Story 2"]
    assert titles(library, query="tag1") == ["Story 1", "Story 3"]
    assert titles(library, query='nothing "of the kind') == []


def test_deleted_branches_and_sessions_come_back(library: Tree):
    session = library.ask("POST", "/sessions", json={"title": "Kept"})
    root = library.do("resume", library.new(session=session["id"], max_tokens=5))
    inner = library.ask("POST", f"/{root['id']}/fork", json={"at": 3})
    leaf = library.ask("POST", f"/{inner['id']}/fork", json={"at": 2})
    library.ask("DELETE", f"/{inner['id']}")
    library.get(inner, 404)
    now = library.get(leaf)
    assert (now["parent"], now["forked_at"]) == (root["id"], 2)
    back = library.ask("POST", f"/{inner['id']}/restore")
    assert back["text"] == inner["text"] or back["length"] == 3
    assert library.get(leaf)["parent"] == inner["id"]
    library.ask("DELETE", f"/sessions/{session['id']}")
    library.ask("GET", f"/sessions/{session['id']}", 404)
    library.get(root, 404)
    complete = library.ask("POST", f"/sessions/{session['id']}/restore")
    assert len(complete["branches"]) == 3 and library.get(root)["text"] == root["text"]
    library.ask("POST", "/branch-none/restore", 404)
    library.ask("POST", "/sessions/session-none/restore", 404)


def test_a_copy_of_a_session_has_branches_of_its_own(library: Tree):
    session = library.ask("POST", "/sessions", json={"title": "One", "tags": ["a"]})
    root = library.do("resume", library.new(session=session["id"], max_tokens=5))
    fork = library.do("resume", library.ask("POST", f"/{root['id']}/fork", json={"at": 3}))
    view = {"current": fork["id"], "undo": [{"branch": root["id"]}]}
    library.ask("PATCH", f"/sessions/{session['id']}", json={"view": view})
    copy = library.ask("POST", f"/sessions/{session['id']}/duplicate")
    first, second = copy["branches"]
    assert copy["title"] == "One (copy)" and copy["tags"] == ["a"]
    assert (second["parent"], second["forked_at"]) == (first["id"], 3)
    assert copy["view"] == {"current": second["id"], "undo": [{"branch": first["id"]}]}
    assert library.get(second)["text"] == fork["text"]
    library.do("rewind", first, to=0)
    assert library.get(root)["text"] == root["text"]


def test_bookmarks_are_kept_with_a_branch(library: Tree):
    branch = library.do("resume", library.new(max_tokens=3))
    marks = [{"at": -1, "label": "start"}, {"at": 2, "label": ""}]
    assert library.ask("PATCH", f"/{branch['id']}", json={"bookmarks": marks})["bookmarks"] == marks
    assert library.get(branch)["bookmarks"] == marks
    library.ask("PATCH", f"/{branch['id']}", json={"name": "n"})
    assert library.get(branch)["bookmarks"] == marks
    library.ask("PATCH", f"/{branch['id']}", 400, json={"bookmarks": [{"at": -2, "label": ""}]})
