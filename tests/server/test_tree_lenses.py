"""`lens` of a look of `/v1/tree`: the logit lens, and a lens that the model has loaded."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tree_client import PROMPT, Tree, tokens


@pytest.fixture(scope="module")
def tuned(server: Any) -> Any:
    """Registered with the model that is served."""
    served = server.state.registry.loaded[server.model].lm
    texts = ["A tree has branches and leaves.", "The sea is blue and the grass is green."]
    yield served.load_lens(served.fit_lens(texts, rank=8, progress=False), name="small")
    served._shared.lenses = None  # other tests share the server


def test_a_look_through_a_lens(tree: Tree, lm: Any, tuned: Any) -> None:
    branch = tree.do("resume", tree.new(), max_tokens=3)
    at = branch["prompt_tokens"]
    looks = {
        name: tree.see(branch, "look", at=at, include="lens", lens=name, top=2)
        for name in ("logit", "small")
    }
    plain = tree.see(branch, "look", at=at, include="lens", top=2)
    assert plain == looks["logit"] and plain["lens"]["kind"] == "logit"
    assert looks["small"]["lens"]["kind"] == "tuned"
    assert {"logit", "small"} <= set(plain["lenses"])
    rows = [look["lens"]["layers"] for look in looks.values()]
    assert rows[0][-1] == rows[1][-1] and rows[0][0] != rows[1][0]
    expected = lm.logit_lens(lm.prompt_ids(PROMPT) + tokens(branch), at, lens=tuned).to_dict()
    for row, other in zip(rows[1], expected["layers"], strict=True):
        assert row["logprob"] == pytest.approx(other["logprob"], abs=1e-3)


def test_a_lens_that_the_model_does_not_have(tree: Tree) -> None:
    branch = tree.do("resume", tree.new(), max_tokens=2)
    error = tree.ask("GET", f"/{branch['id']}/look?include=lens&lens=sharp", 400)
    assert "there is no lens 'sharp' (loaded: logit" in error["error"]["message"]
