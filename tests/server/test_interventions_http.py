"""Interventions over HTTP: in every dialect with Unspool's fields, in the tree, and stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.tree_client import PROMPT, SAMPLING, Tree, tokens
from unspool.backends.interventions import Add, Intervention, Scale
from unspool.server.http.errors import ApiError
from unspool.server.runtime.schema import (
    MAX_INTERVENTION_BYTES,
    MAX_INTERVENTIONS,
    parse_interventions,
)


@pytest.fixture(scope="module")
def steering(lm: Any) -> list[dict[str, Any]]:
    vector = 4 * np.random.default_rng(1).standard_normal(lm.config.width)
    return [
        Intervention("resid_post", Add(vector), layers=0).to_dict(),
        {
            "hook": "blocks.1.hook_mlp_out",
            "op": {"kind": "scale", "factor": 0},
            "positions": [3, None],
        },
    ]


def test_every_dialect_takes_them(http: Any, lm: Any, steering: list[dict[str, Any]]):
    options = {"max_tokens": 8, "seed": 5, "temperature": 0.9}
    alone = lm.generate("We", interventions=steering, top_k=0, **options)
    plain = lm.generate("We", top_k=0, **options)
    assert alone.text != plain.text
    body = {"prompt": "We", "top_k": 0, **options, "unspool": {"interventions": steering}}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == alone.text
    messages = [{"role": "user", "content": "Name a colour."}]
    expected = lm.chat(messages, interventions=steering, top_k=0, **options).text
    assert expected != lm.chat(messages, top_k=0, **options).text
    body = {"messages": messages, "top_k": 0, **options, "unspool": {"interventions": steering}}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] == expected
    extension = {"interventions": steering, "seed": 5}
    body = {"messages": messages, "max_tokens": 8, "temperature": 0.9, "top_k": 0}
    reply = http.post("/v1/messages", json={**body, "model": "smollm", "unspool": extension}).json()
    assert "content" in reply, reply
    assert reply["content"][0]["text"] == expected


def test_branches_keep_them(tree: Tree, lm: Any, steering: list[dict[str, Any]]):
    alone = lm.generate(PROMPT, max_tokens=12, interventions=steering, **SAMPLING)
    plain = lm.generate(PROMPT, max_tokens=12, **SAMPLING)
    branch = tree.new(max_tokens=6, interventions=steering)
    (first, second) = branch["settings"]["interventions"]
    assert first["op"]["vector"] == {"shape": [lm.config.width]} and second["site"] == "mlp_out"
    tree.do("resume", branch)
    fork = tree.ask("POST", f"/{branch['id']}/fork", json={})
    for item in (branch, fork):
        assert tokens(tree.do("resume", item)) == alone.tokens
    at = len(alone.prompt) + 3
    look = tree.see(branch, "look", at=at, include="vectors")
    expected = lm.look(alone, position=at)
    assert look["norms"] == pytest.approx(expected.norms.tolist(), abs=1e-3)
    best = tree.see(branch, "alternatives", at=3, top=1)["candidates"][0]
    assert best["logprob"] == pytest.approx(alone.alternatives(3, 1)[0].logprob, abs=1e-4)
    # Without them from here on.
    tree.do("rewind", branch, to=0)
    unsteered = tree.do("resume", branch, max_tokens=12, interventions=None)
    assert tokens(unsteered) == plain.tokens and unsteered["settings"]["interventions"] == []


def test_limits_and_mistakes(http: Any, tree: Tree):
    def ask(interventions: Any) -> dict[str, Any]:
        body = {"prompt": "We", "max_tokens": 1, "unspool": {"interventions": interventions}}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
        message: dict[str, Any] = answer.json()["error"]["message"]
        return message

    zero = {"site": "mlp_out", "op": {"kind": "scale"}}
    assert str(MAX_INTERVENTIONS) in ask([zero] * (MAX_INTERVENTIONS + 1))
    assert "layer must be from 0 to" in ask([{**zero, "layers": 99}])
    assert "site must be one of" in ask([{**zero, "site": "soul"}])
    assert "needs site" in ask([{"site": "mlp_out"}])
    large = Intervention("logits", Add(np.ones(MAX_INTERVENTION_BYTES // 8))).to_dict()
    with pytest.raises(ApiError, match="may have at most 16 MB"):
        parse_interventions([large] * 3)
    tree.ask("POST", "", 400, json={"prompt": "We", "interventions": [{**zero, "layers": 99}]})
    assert Intervention("mlp_out", Scale()).to_dict()["op"] == {"kind": "scale", "factor": 0.0}
