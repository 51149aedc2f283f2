"""`patch` of `/v1/tree`: the table of a sweep, its cells as texts, and bad requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.running_server import settled
from helpers.tree_client import Tree, read

CLEAN = [300, 400, 500, 600, 700, 800]
SWAP = {"position": 2, "token": 501}


@pytest.fixture(scope="module")
def branch(tree: Tree) -> Any:
    return tree.new(prompt=CLEAN)


def patch(tree: Tree, branch: Any, status: int = 200, **body: Any) -> Any:
    return tree.ask("POST", f"/{branch['id']}/patch", status, json=body)


def events(tree: Tree, branch: Any, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    with tree.http.stream("POST", f"/v1/tree/{branch['id']}/patch", json=body) as answer:
        return [(name, data) for name, data, _ in read(answer)]


def test_the_table_is_the_sweep(tree: Tree, branch: Any, lm: Any) -> None:
    (first, start), *rows, (last, _) = events(tree, branch, replace=SWAP, site="mlp_out")
    assert (first, last) == ("start", "done") and {name for name, _ in rows} == {"row"}
    assert start["positions"] == [2, 3, 4, 5] and start["layers"] == [0, 1, 2, 3]
    assert [row["layer"] for _, row in rows] == [3, 2, 1, 0]
    corrupted = [token["id"] for token in start["corrupted_tokens"]]
    assert corrupted == [300, 400, 501, 600, 700, 800]
    answer, other = start["answer"]["id"], start["other"]["id"]
    assert answer == start["candidates"]["clean"][0]["id"] != other
    sweep = lm.patch(CLEAN, corrupted, answer=answer, other=other, site="mlp_out", progress=False)
    values = np.array([row["values"] for _, row in rows[::-1]])
    np.testing.assert_allclose(values, sweep.values[:, 2:], atol=2e-5)
    assert start["clean"] == pytest.approx(sweep.clean, abs=1e-5)
    assert start["corrupted"] == pytest.approx(sweep.baseline, abs=1e-5)
    by_text = events(tree, branch, corrupted=corrupted, answer=answer, other=other, site="mlp_out")
    assert by_text[:-1] == [("start", start), *rows]


def test_the_text_of_a_cell(tree: Tree, branch: Any, lm: Any) -> None:
    last_cell = patch(tree, branch, replace=SWAP, cell={"layer": 3, "position": 5}, max_tokens=1)
    # After the last layer at the last position, nothing of the corrupted text is left.
    assert last_cell["text"] == lm.generate(CLEAN, temperature=0, max_tokens=1).text
    corrupted = [*CLEAN[:2], 501, *CLEAN[3:]]
    assert last_cell["corrupted"] == lm.generate(corrupted, temperature=0, max_tokens=1).text
    sweep = lm.patch(CLEAN, corrupted, answer=70, other=71, progress=False)
    cell = patch(tree, branch, replace=SWAP, cell={"layer": 1, "position": 4}, max_tokens=5)
    expected = lm.generate(
        corrupted, temperature=0, max_tokens=5, interventions=sweep.interventions(1, 4)
    )
    assert cell["text"] == expected.text


def test_a_client_that_leaves(tree: Tree, server: Any) -> None:
    long = tree.new(prompt=[300 + n for n in range(200)])
    path, swap = f"/v1/tree/{long['id']}/patch", {"position": 1, "token": 9}
    with tree.http.stream("POST", path, json={"replace": swap}) as answer:
        next(read(answer))
    settled(server)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "either replace or corrupted"),
        ({"replace": SWAP, "corrupted": "a"}, "either replace or corrupted"),
        ({"corrupted": [1, 2]}, "same number of tokens: the clean one has 6, the corrupted one 2"),
        ({"corrupted": CLEAN}, "are the same"),
        ({"replace": {"position": 6, "token": 1}}, "position must be 0 to 5"),
        ({"replace": {"position": 1, "token": 10**6}}, "not in the vocabulary"),
        ({"replace": SWAP, "end": 7}, "end must be 1 to 6"),
        ({"replace": SWAP, "answer": 7, "other": 7}, "must be two tokens"),
        ({"replace": SWAP, "answer": "two words here"}, "must be one token"),
        ({"replace": SWAP, "cell": {"layer": 4, "position": 0}}, "the table has layers 0 to 3"),
        ({"replace": SWAP, "site": "logits"}, "site"),
    ],
)
def test_bad_requests(tree: Tree, branch: Any, body: dict[str, Any], message: str) -> None:
    assert message in patch(tree, branch, 400, **body)["error"]["message"]


def test_a_table_that_is_too_large(tree: Tree) -> None:
    long = tree.new(prompt=[300 + n for n in range(520)])
    swap = {"position": 0, "token": 9}
    assert "at most 512" in patch(tree, long, 400, replace=swap)["error"]["message"]
