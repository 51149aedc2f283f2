"""Gaps filled by masked models, and doubt by them: against a model whose answers are known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers.decoding_support import pages_left
from helpers.word_model import save_worded
from unspool import SettingsError, gap
from unspool.decoding.edit.edit import masked_surprise, score_doubts
from unspool.decoding.infill.masked import MaskedModel, WholeText, fill_by_masks
from unspool.decoding.infill.result import GappedText

TEXT = "The scheduler plans rows, and the batch builder makes a step of them."


class Knows:
    """A masked model that has one text by heart, and finds any other token unlikely."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.mask_id = tokenizer, len(tokenizer)
        self.ids = tokenizer.encode(text)

    def logits(self, row: Sequence[int]) -> np.ndarray[Any, Any]:
        """Sure where the row is as long as the text; unsure where it is not."""
        result = np.zeros((len(row), self.mask_id + 1), np.float32)
        if len(row) == len(self.ids):
            result[np.arange(len(row)), self.ids] = 12.0
        return result


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_worded(tmp_path_factory.mktemp("worded"))
    return unspool.load(folder, backend="torch", memory=16 << 20)


@pytest.mark.parametrize(
    "inside", ["batch", "batch builder", "scheduler plans rows", "The", "them", "step of them."]
)
@pytest.mark.parametrize("spaced", [False, True])
def test_the_right_length_and_words_are_found(worded, inside: str, spaced: bool):
    prefix, right = TEXT.split(inside, 1)
    if spaced and prefix.endswith(" "):
        prefix, inside = prefix[:-1], " " + inside  # the gap may begin with the space, too
    knows = Knows(worded.tokenizer, TEXT)
    assert isinstance(knows, MaskedModel)
    result = fill_by_masks(knows, GappedText.parse([prefix, gap, right]), candidates=5, top=2)
    best = result[0]
    assert (best.texts, best.text) == ((inside,), TEXT)
    assert best.score == pytest.approx(0, abs=0.01)
    assert "".join(step.text for step in best.gap_steps[0]) == inside
    assert all(step.rank == 0 and len(step.candidates) == 2 for step in best.steps)
    assert [item.score for item in result] == sorted((item.score for item in result), reverse=True)


def test_several_gaps_at_once(worded):
    parts = GappedText(
        ("The ", " plans rows, and the ", " builder makes a step of them."), (gap(1, 3), gap(1, 2))
    )
    best = fill_by_masks(Knows(worded.tokenizer, TEXT), parts, candidates=3)[0]
    assert best.text == TEXT and best.texts[1] == "batch"


def test_a_twin_proposes_and_the_causal_model_ranks(worded):
    prefix, right = TEXT.split("batch")
    knows = Knows(worded.tokenizer, TEXT)
    result = worded.fill(prefix, gap(1, 4), right, twin=knows, candidates=300, reach=None)
    texts = [item.texts[0] for item in result.candidates]
    assert result.by == "ranking" and "batch" in texts
    alone = worded.fill(prefix, gap, right, choices=sorted(texts), candidates=300, reach=None)
    assert [item.texts[0] for item in alone.candidates] == texts


def test_doubt_of_a_planted_word(worded):
    """The masked model knows better than the surprise of a random one."""
    knows = Knows(worded.tokenizer, TEXT)
    ids = worded.tokenizer.encode(TEXT)
    place = len(ids) // 2
    wrong = [*ids[:place], worded.tokenizer.encode(" tree")[0], *ids[place + 1 :]]
    text = worded.tokenizer.decode(wrong)
    if worded.tokenizer.encode(text) == wrong:
        _, surprise = masked_surprise(knows, text)
        assert int(np.argmax(surprise)) == place
    result, score = score_doubts(worded, text, by="masked", twin=knows)
    worst = max(result, key=lambda doubt: doubt.surprise)
    at = len(worded.tokenizer.decode(ids[:place]))
    assert worst.start <= at + 1 < worst.end + 1 and math.isfinite(score.perplexity)
    pair, _ = score_doubts(worded, text, by="both", twin=knows)
    causal, _ = score_doubts(worded, text, by="causal")
    for item, two, mean in zip(result, causal, pair, strict=True):
        assert mean.surprise == pytest.approx((item.surprise + two.surprise) / 2)


# -- a loaded model whose tokens see the whole text --------------------------------------------


class SeesAll:
    """A session that is said to look both ways: what a masked checkpoint will be."""

    def __init__(self, lm: Any, **facts: Any) -> None:
        self._lm, self.config = lm, dataclasses.replace(lm.config, **facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)


@pytest.mark.parametrize("shifted", [False, True])
def test_every_place_sees_the_whole_row(worded, shifted: bool):
    from transformers import AutoModelForCausalLM

    model = WholeText(SeesAll(worded, sight="whole", mask_id=3, shifted=shifted))  # type: ignore[arg-type]
    row = worded.tokenizer.encode(TEXT)
    oracle = AutoModelForCausalLM.from_pretrained(worded.path, attn_implementation="eager").eval()
    visited = torch.zeros(1, 1, len(row), len(row))
    with torch.no_grad():
        expected = oracle(torch.tensor([row]), attention_mask=visited).logits[0].numpy()
    if shifted:
        expected = expected[[0, *range(len(row) - 1)]]
    assert np.asarray(model.logits(row)) == pytest.approx(expected, abs=2e-3)
    assert pages_left(worded) == 0


def test_a_model_without_a_mask_token_is_refused(worded):
    with pytest.raises(SettingsError, match="no mask token"):
        WholeText(worded)
    with pytest.raises(SettingsError, match="no mask token"):
        worded.edit(TEXT, twin=worded)


def test_a_masked_model_fills_by_itself(tmp_path):
    lm = unspool.load(save_worded(tmp_path), backend="torch", memory=16 << 20)
    for name, value in {"sight": "whole", "mask_id": 3}.items():
        object.__setattr__(lm.config, name, value)
    result = lm.fill("The scheduler plans", gap(1, 3), ", and the tree", candidates=6, top=3)
    assert result.by == "masked" and len(result.candidates) == 6
    for item in result.candidates:
        assert item.text == f"The scheduler plans{item.texts[0]}, and the tree"
        assert item.score == pytest.approx(
            sum(step.logprob for step in item.steps) / len(item.steps), abs=1e-6
        )
        assert all(step.token != 3 for step in item.steps)
    with pytest.raises(SettingsError, match="give this one as its twin"):
        lm.edit(TEXT)
    lm.close()
