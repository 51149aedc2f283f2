"""`/v1/puzzles`: made and judged; and the models that come with Unspool, asked for by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from helpers.running_server import Running, running
from unspool.server.runtime.registry import ModelEntry
from unspool.train.twins.puzzles import puzzle_by_name


@pytest.fixture(scope="module")
def serving(small_entry: ModelEntry) -> Iterator[Running]:
    with running([small_entry]) as result:
        yield result


@pytest.fixture(scope="module")
def client(serving: Running) -> httpx.Client:
    return serving.http


def ask(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_puzzle_is_made_anew_or_by_its_seed(client: httpx.Client) -> None:
    created = [ask(client, "/v1/puzzles", puzzle="sudoku", empty=48)["prompt"] for _ in range(2)]
    assert created[0] != created[1] and created[0].count(".") == 48
    repeated = [ask(client, "/v1/puzzles", puzzle="sudoku", seed=3) for _ in range(2)]
    assert repeated[0] == repeated[1] and repeated[0]["places"] == puzzle_by_name("sudoku").answer
    ask(client, "/v1/puzzles", 400, puzzle="chess")


def test_an_answer_is_judged(client: httpx.Client) -> None:
    prompts, answers = puzzle_by_name("sudoku").generate(1, np.random.default_rng(0))
    body, right = {"puzzle": "sudoku", "prompt": prompts[0]}, answers[0]
    assert ask(client, "/v1/puzzles/judge", **body, answer=right)["solved"] is True
    assert ask(client, "/v1/puzzles/judge", **body, answer=right[::-1])["solved"] is False
    wrong = {**body, "prompt": "x" * 16, "answer": right}
    assert "not a sudoku" in ask(client, "/v1/puzzles/judge", 400, **wrong)["error"]["message"]


def test_its_models_are_loaded_by_name_and_listed_nowhere(client, serving):
    created = ask(client, "/v1/puzzles", puzzle="sudoku", seed=3)
    body = {"prompt": created["prompt"], "max_tokens": created["places"]}
    filled = ask(client, "/v1/diffuse", **body, model=created["models"]["whole"])
    assert len(filled["tokens"]) <= 81 and filled["model"] == "sudoku"
    written = ask(client, "/v1/completions", **body, model=created["models"]["causal"])
    assert written["model"] == "sudoku-causal"
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["small"]
    assert client.get("/v1/models/sudoku").json()["unspool"]["source"] == "shipped"
    assert set(serving.state.registry.ephemeral) == {"sudoku", "sudoku-causal"}


@pytest.mark.parametrize("name", ["sudoku/../sudoku", "../shipped/sudoku", "shipped", "sudoko"])
def test_nothing_else_is_found_so(client: httpx.Client, name: str) -> None:
    assert (
        "no such model"
        in ask(client, "/v1/completions", 404, model=name, prompt="1")["error"]["message"]
    )
