"""`look` of `/v1/tree`: the numbers a picture of the way through the model is drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.tree_client import Tree, tokens
from unspool.lens.activations import get_activations
from unspool.server.tree.look import MAX_CELL, MAX_CELLS, _position_json, _vectors


@pytest.fixture(scope="module")
def tree(server: Any) -> Iterator[Tree]:
    result = Tree(server.url)
    yield result
    result.http.close()


@pytest.fixture(scope="module")
def branch(tree: Tree) -> dict[str, Any]:
    result: dict[str, Any] = tree.do("resume", tree.new(max_tokens=4))
    return result


def whole(branch: dict[str, Any]) -> list[int]:
    return [token["id"] for token in branch["prompt"]["tokens"]] + tokens(branch)


def test_vectors_are_those_of_the_run(tree: Tree, branch: dict[str, Any], lm: Any):
    result = tree.see(branch, "look", step=2, include="vectors", top=3)
    observed = get_activations(lm, whole(branch), result["position"])
    vectors = result["vectors"]
    assert vectors["every"] == 1 and vectors["width"] == lm.config.width
    cells, scales = np.array(vectors["cells"]), np.array(vectors["scales"])
    assert cells.shape == observed.residuals.shape and abs(cells).max() == MAX_CELL
    # Half a cell off at most, up to what the server's other arithmetic leaves.
    apart = abs(cells * scales[:, None] - observed.residuals)
    assert (apart <= scales[:, None] * 0.51 + abs(observed.residuals).max(1)[:, None] * 0.01).all()
    assert len(str(vectors)) < 100_000 and "attention" not in result


def test_the_head_ends_where_the_step_began(tree: Tree, branch: dict[str, Any]):
    result = tree.see(branch, "look", step=2, include="vectors", top=3)
    step = branch["steps"][2]
    head = result["head"]
    assert head["followed"]["id"] == step["token"] and head["followed"]["rank"] == step["rank"]
    chance = math.exp(step["logprob"])
    assert head["followed"]["probability"] == pytest.approx(chance, rel=1e-2)
    assert [c["id"] for c in head["candidates"]] == [c["token"] for c in step["candidates"][:3]]
    first, second, _ = head["candidates"]
    odds = math.log(first["probability"] / second["probability"])
    assert odds == pytest.approx(first["logit"] - second["logit"], abs=1e-4)
    assert head["vocabulary"] == 49152 and head["norm"] > 0
    # At the end of the text nothing was picked: the likeliest is followed.
    last = tree.see(branch, "look", include="vectors", top=1)
    assert last["picked"] is None and last["head"]["followed"]["rank"] == 0


def test_dials_tell_the_position(tree: Tree, branch: dict[str, Any]):
    far = tree.see(branch, "look", at=6, include="vectors")["position_told"]
    near = tree.see(branch, "look", at=0, include="vectors")["position_told"]
    assert far["way"] == "rotary" and far["pairs"] == 32
    assert [dial["pair"] for dial in far["dials"]] == [1, 5, 10, 14, 19, 23, 28, 32]
    angles = [dial["angle"] for dial in far["dials"]]
    assert angles[0] == 6 and angles == sorted(angles, reverse=True)
    assert all(dial["angle"] == 0 for dial in near["dials"])


def test_the_map_without_the_first_token(tree: Tree, branch: dict[str, Any]):
    result = tree.see(branch, "look", step=1, include="attention", heads=True)["attention"]
    reply = result["map_without_first"]
    places, weights = np.array(reply["place"]), np.array(reply["weight"])
    assert places.min() >= 1
    others = np.array(result["by_head"])[..., 1:]
    sums = others.sum(-1)
    clear = sums > 0.05  # of what is left elsewhere, too few digits are told to divide
    at_place = np.take_along_axis(others, places[..., None] - 1, -1)[..., 0]
    for mine in (others.max(-1), at_place):
        assert clear.any() and np.allclose(weights[clear], mine[clear] / sums[clear], atol=1e-3)
    first = tree.see(branch, "look", at=0, include="attention")["attention"]
    assert first["map_without_first"] is None and first["mean"] == [1]


def test_wide_vectors_are_told_by_their_furthest_numbers(lm: Any, branch: dict[str, Any]):
    observed = get_activations(lm, whole(branch), 3)
    wide = replace(observed, residuals=np.tile(observed.residuals, (1, 9))[:, :5001])
    reply = _vectors(wide)
    cells = np.array(reply["cells"]) * np.array(reply["scales"])[:, None]
    assert reply["every"] == 9 and cells.size <= MAX_CELLS and reply["width"] == 5001
    run = wide.residuals[7, 9:18]
    assert cells[7, 1] == pytest.approx(run[abs(run).argmax()], abs=reply["scales"][7])


def test_positions_that_are_no_angles(lm: Any):
    learned = SimpleNamespace(config=replace(lm.config, positions="learned", rotary=None))
    assert _position_json(learned, 2) == {"way": "learned", "pairs": 0, "dials": []}
