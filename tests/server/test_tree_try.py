"""`try` of `/v1/tree`: one step with other settings is what writing with them would have been."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tree_client import Tree

OFF = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 2, "min_p": 0.01},
    {**OFF, "top_k": 100, "temperature": 1.7},
    {**OFF, "stages": ["temperature", "top_k", "top_p"], "top_k": 50, "top_p": 0.9},
    {**OFF, "typical_p": 0.8, "top_n_sigma": 2},
    {**OFF, "xtc_probability": 1, "eta": 0.001},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "no_repeat_ngram": 2},
    {"regex": "(.|\\n)+"},
    {**OFF, "mirostat_tau": 3},
    {"stop": ["a", "e"], "guard": "loop", "speculate": "lookup", "max_tokens": 9},
]


@pytest.fixture(scope="module")
def tree(server: Any) -> Tree:
    return Tree(server.url)


def test_a_try_is_what_writing_would_have_been_and_changes_nothing(tree: Tree) -> None:
    branch = tree.do("resume", tree.new(max_tokens=8))
    before = tree.ask("GET", "")["data"]
    for settings in WAYS:
        tried = tree.ask("POST", f"/{branch['id']}/try", json={"at": 5, "top": 20, **settings})
        assert (tried["branch"], tried["at"]) == (branch["id"], 5)
        assert len(tried["step"]["candidates"]) == 20
        fork = tree.do("fork", branch, at=5)
        last = {**settings, "max_tokens": 1, "stop": [], "guard": None, "top": 20}
        wrote = tree.do("resume", fork, **last)["steps"][5]
        assert [_outline(tried["step"]), settings] == [_outline(wrote), settings]
        tree.ask("DELETE", f"/{fork['id']}")
    assert tree.ask("GET", "")["data"] == before
    assert tree.get(branch) == branch


def _outline(step: dict[str, Any]) -> list[Any]:
    stages = [(stage["name"], stage["kept"]) for stage in step["stages"]]
    return [step["token"], step["position"], (step["draw"] or {}).get("u"), stages]


def test_a_try_behind_the_end_and_what_is_refused(tree: Tree) -> None:
    branch = tree.do("resume", tree.new(max_tokens=3))
    tried = tree.ask("POST", f"/{branch['id']}/try", json={})
    assert tried["at"] == 3 and tried["step"]["index"] == 3
    tree.ask("POST", f"/{branch['id']}/try", 400, json={"at": 4})
    tree.ask("POST", f"/{branch['id']}/try", 400, json={"temperature": -1})
    tree.ask("POST", f"/{branch['id']}/try", 400, json={"n": 2})
    tree.ask("POST", "/branch-nobody/try", 404, json={})
