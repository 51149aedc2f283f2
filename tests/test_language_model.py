"""The face of the model: what people call, and what it gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROMPT = [5, 6, 7, 8]


def test_every_strategy_is_a_method(tiny_lm: Any):
    options = {"max_tokens": 4, "seed": 3, "end": False}
    texts = tiny_lm.samples(PROMPT, 3, **options)
    assert [len(text.tokens) for text in texts] == [4, 4, 4]
    assert tiny_lm.best_of(PROMPT, 3, **options).best.tokens in [text.tokens for text in texts]
    assert tiny_lm.vote(PROMPT, 3, extract=lambda text: 1, **options).counts == {1: 3}
    assert len(tiny_lm.beam(PROMPT, beams=3, results=2, max_tokens=4).generations) == 2
    assert len(tiny_lm.contrastive(PROMPT, k=2, max_tokens=3, end=False).tokens) == 3
    assert tiny_lm.search(PROMPT, width=2, tokens=2, keep=1, depth=2, seed=1).best.tokens


def test_every_lens_is_a_method(tiny_lm: Any):
    seen = tiny_lm.look(PROMPT, 2)
    assert seen.position == 2 and seen.picked == PROMPT[3]
    lens, again = tiny_lm.logit_lens(seen), tiny_lm.logit_lens(PROMPT, 2)
    assert lens.token == again.token == PROMPT[3]
    assert tiny_lm.attribution(seen).token == tiny_lm.attribution(PROMPT, 2).token == PROMPT[3]
    assert len(tiny_lm.neighbours(7, 3)) == 3
    assert np.linalg.norm(tiny_lm.embed(PROMPT)) == pytest.approx(1, abs=1e-5)


def test_a_text_is_saved_and_written_again(tiny_lm: Any, tmp_path: Path):
    text = tiny_lm.generate(PROMPT, max_tokens=5, seed=2, top=2, explain=True)
    tiny_lm.save_trace(text, tmp_path / "trace.json")
    for trace in (tiny_lm.trace(text), tmp_path / "trace.json", str(tmp_path / "trace.json")):
        result = tiny_lm.replay(trace)
        assert result.exact
        assert result.generation.tokens == text.tokens
