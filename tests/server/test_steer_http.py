"""Steering vectors over HTTP: by names that the server has, and by nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tree_client import PROMPT, SAMPLING, Tree, tokens
from unspool.lens.steering import SteeringVector

OPTIONS = {"max_tokens": 8, "seed": 5, "temperature": 0.9, "top_k": 0}


@pytest.fixture(scope="module")
def vector(lm: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    values = 4 * np.random.default_rng(1).standard_normal(lm.config.width)
    made = SteeringVector({1: values}, name="odd")
    made.save(tmp_path_factory.mktemp("vectors") / "odd.gguf")
    return made


@pytest.fixture(scope="module", autouse=True)
def loaded(server: Any, vector: SteeringVector) -> None:
    server.state.registry.loaded[server.model].lm.load_steering_vector(vector)


def test_a_name_and_a_strength(http: Any, lm: Any, vector: SteeringVector):
    steered = lm.generate("We", steer=[(vector, 1.5)], **OPTIONS)
    assert steered.text != lm.generate("We", **OPTIONS).text
    body = {"prompt": "We", **OPTIONS, "unspool": {"steer": {"odd": 1.5}}}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == steered.text


def test_a_branch_is_steered_and_keeps_it(tree: Tree, lm: Any, vector: SteeringVector):
    alone = lm.generate(PROMPT, max_tokens=12, steer=[(vector, 1.5)], **SAMPLING)
    branch = tree.new(max_tokens=6, steer={"odd": 1.5})
    tree.do("resume", branch)
    assert tokens(tree.do("resume", branch)) == alone.tokens


@pytest.mark.parametrize(
    ("steer", "message"),
    [
        ({"absent": 1.0}, "no steering vector 'absent'"),
        ({"../odd.gguf": 1.0}, "no steering vector"),
        ({"/etc/passwd": 1.0}, "no steering vector"),
        ({"odd": "much"}, "steer"),
        ([["odd", 1.0]], "steer"),
        ({f"name{n}": 1.0 for n in range(17)}, "steer"),
    ],
)
def test_bad_steering(http: Any, steer: Any, message: str):
    reply = http.post("/v1/completions", json={"prompt": "We", "unspool": {"steer": steer}})
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_no_file_is_read_by_a_request(http: Any, tmp_path: Path, vector: SteeringVector):
    vector.save(tmp_path / "mine.gguf")
    body = {"prompt": "We", "unspool": {"steer": {str(tmp_path / "mine.gguf"): 1.0}}}
    assert http.post("/v1/completions", json=body).status_code == 400
