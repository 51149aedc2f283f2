"""`futures` of `/v1/tree`: the tree of the most likely continuations, whole and as events."""

from __future__ import annotations

import math
from typing import Any

import pytest

from helpers.running_server import settled
from helpers.tree_client import Tree, read, tokens


def check(data: list[dict[str, Any]], mass: float) -> dict[int, dict[str, Any]]:
    """All nodes by number, with consistent masses."""
    nodes: dict[int, dict[str, Any]] = {0: {"mass": 1.0, "path": []}}
    for item in data:
        parent = nodes[item["node"]]
        total = math.fsum(child["p"] for child in item["children"]) + item["other_probability"]
        assert total == pytest.approx(1.0, abs=1e-9)
        for child in item["children"]:
            assert child["mass"] == pytest.approx(parent["mass"] * child["p"])
            assert child["mass"] >= mass
            assert child["node"] not in nodes
            nodes[child["node"]] = {**child, "path": [*parent["path"], child["token"]]}
    return nodes


def test_futures_of_a_branch(tree: Tree, lm: Any) -> None:
    branch = tree.do("resume", tree.new(), max_tokens=6)
    body = {"at": 2, "mass": 0.01, "depth": 4, "nodes": 100}
    result = tree.ask("POST", f"/{branch['id']}/futures", json=body)
    assert (result["object"], result["at"], result["complete"]) == ("tree.futures", 2, True)
    nodes = check(result["data"], 0.01)
    assert len(nodes) - 1 == result["nodes"] <= 100
    ids = [token["id"] for token in branch["prompt"]["tokens"]] + tokens(branch)[:2]
    expected = lm.futures(ids, mass=0.01, depth=4, nodes=101)
    masses = sorted(node["mass"] for node in list(nodes.values())[1:])
    assert masses == pytest.approx(sorted(n.mass for n in expected.root.walk() if n.parent))
    assert tree.get(branch) == branch  # it has not changed
    sampled = tree.ask("POST", f"/{branch['id']}/futures", json={**body, "sampled": True})
    assert check(sampled["data"], 0.01).keys() and sampled["data"] != result["data"]
    # A leaf opens as a branch, whose probability is the mass.
    leaf = max((node for node in nodes.values() if len(node["path"]) == 4), key=lambda n: n["mass"])
    fork = tree.do("fork", branch, at=2)
    opened = tree.do("append", fork, tokens=leaf["path"])
    logprob = sum(step["logprob"] for step in opened["steps"][2:])
    assert math.exp(logprob) == pytest.approx(leaf["mass"], rel=1e-3)


def test_events_and_a_client_that_leaves(tree: Tree, server: Any) -> None:
    branch = tree.new()
    path, body = f"/v1/tree/{branch['id']}/futures", {"mass": 0.02, "depth": 3, "stream": True}
    with tree.http.stream("POST", path, json=body) as answer:
        events = [(name, data) for name, data, _ in read(answer)]
    names = [name for name, _ in events]
    assert names[0] == "start" and names[-1] == "done" and set(names[1:-1]) == {"grown"}
    nodes = check([data for name, data in events if name == "grown"], 0.02)
    assert events[-1][1] == {"nodes": len(nodes) - 1, "complete": True}
    huge = {"mass": 0, "depth": 64, "nodes": 2000, "width": 500, "seconds": 60, "stream": True}
    with tree.http.stream("POST", path, json=huge) as answer:
        assert next(read(answer))[0] == "start"
    settled(server)  # nothing is computed any more
    assert tree.do("resume", branch, max_tokens=2)["length"] == 2


def test_limits_and_mistakes(tree: Tree) -> None:
    branch = tree.new(regex="a+")
    path = f"/{branch['id']}/futures"
    few = tree.ask("POST", path, json={"mass": 0, "nodes": 7, "width": 3, "depth": 64})
    assert few["nodes"] == 7 and not few["complete"]
    for body, words in (
        ({"mass": 2}, "mass"), ({"depth": 65}, "depth"), ({"nodes": 10**6}, "nodes"),
        ({"seconds": 0}, "seconds"), ({"at": 5}, "at"), ({"sampled": True}, "grammar"),
    ):  # fmt: skip
        result = tree.ask("POST", path, 400, json=body)
        assert words in result["error"]["message"]
    tree.ask("POST", "/branch-none/futures", 404, json={})
