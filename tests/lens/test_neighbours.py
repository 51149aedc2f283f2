"""Nearest tokens by embedding."""

from __future__ import annotations

import numpy as np
import pytest

from unspool.errors import ModelFileError, SettingsError
from unspool.lens import activations
from unspool.lens.embeddings import neighbours


@pytest.mark.parametrize("rows_at_once", [7, 4096])
def test_as_by_brute_force(tiny_lm, monkeypatch, rows_at_once):
    monkeypatch.setattr(activations, "_CHUNK_ROWS", rows_at_once)
    table = tiny_lm.transformer.embed.weight.detach().double().numpy()
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    cosines = unit @ unit[42]
    cosines[42] = -2
    result = neighbours(tiny_lm, 42, 12)
    assert [near.token for near in result] == np.argsort(-cosines)[:12].tolist()
    assert [near.similarity for near in result] == pytest.approx(np.sort(cosines)[::-1][:12])
    assert result[0].to_dict().keys() == {"token", "text", "similarity"}


def test_tokens_without_direction_are_near_to_nothing(family_lm):
    lm = family_lm("smollm3")
    table = lm.transformer.embed.weight.data
    row_before = table[5].clone()
    table[5] = 0
    try:
        result = neighbours(lm, 5, 3)
        assert [near.similarity for near in result] == [0, 0, 0]
        assert all(np.isfinite(near.similarity) for near in neighbours(lm, 6, 300))
    finally:
        table[5] = row_before


def test_all_but_itself_at_the_most(tiny_lm):
    result = neighbours(tiny_lm, 3, 100_000)
    assert len(result) == 258 and 3 not in {near.token for near in result}
    assert neighbours(tiny_lm, 3, 0) == ()


def test_what_has_no_neighbours(tiny_lm):
    for token in (-1, 259, True, 1.0):
        with pytest.raises(SettingsError, match="vocabulary"):
            neighbours(tiny_lm, token)
    with pytest.raises(SettingsError, match="count"):
        neighbours(tiny_lm, 1, -1)
    with pytest.raises(ModelFileError, match="no tokenizer"):
        neighbours(tiny_lm, "text without a vocabulary")


@pytest.mark.real
def test_on_the_default_model(lm):
    result = neighbours(lm, " king", 20)
    assert {near.text.strip().lower() for near in result} & {"kings", "queen", "king"}
    with pytest.raises(SettingsError, match=r"2 tokens|3 tokens|4 tokens"):
        neighbours(lm, "unspooling")
    with pytest.raises(SettingsError, match="0 tokens"):
        neighbours(lm, "")
