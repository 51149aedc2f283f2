"""Decode attention over pages against plain torch, run by Triton's interpreter without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.attention_support import Texts, a_layer, cut_small, expected, some_texts
from unspool.backends.cuda import attention
from unspool.backends.cuda.attention import decode_attention, num_pieces, store_keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(texts: Texts, new: bool, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    texts, out, scratch = texts.copy(), texts.out, texts.scratch
    options.setdefault("pieces", num_pieces(texts.layer, int(texts.lines.ends.max())))
    if not new:
        store_keys(texts.qkv, texts.keys, texts.values, texts.layer, texts.lines, pdl=False)
    decode_attention(
        texts.qkv, out, texts.keys, texts.values, texts.layer, texts.lines, scratch,
        new=new, pdl=False, **options,
    )  # fmt: skip
    assert not scratch.arrived.any(), "the scratch is clean for the next launch"
    return out, texts.keys, texts.values


def check(texts: Texts, new: bool, **options: Any) -> None:
    for actual, expected_ in zip(run(texts, new, **options), expected(texts), strict=True):
        torch.testing.assert_close(actual, expected_, rtol=2e-5, atol=2e-5)


LAYERS = {
    "plain": {},
    "no rotary, sinks": {"rotary": 0, "sinks": True},
    "window, softcap": {"window": 70, "softcap": 3.0},
    "one head each": {"heads": 3, "kv_heads": 3},
    "three a key head": {"heads": 9, "kv_heads": 3, "head_width": 8},
    "odd width, partial rotary, head norm": {"head_width": 20, "rotary": 10, "norm": True},
    "wide": {"heads": 2, "kv_heads": 1, "head_width": 80},
    "many a key head": {"heads": 40, "kv_heads": 2},
}


@pytest.mark.parametrize("new", (True, pytest.param(False, marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", LAYERS)
def test_as_plain_torch(name: str, new: bool):
    layer = a_layer(**LAYERS[name])
    check(some_texts(layer, [1, 65, 90], [1] * 3, device=DEVICE), new)


@pytest.mark.parametrize("window", (0, 150))
def test_long_texts_are_cut_into_pieces(window: int, monkeypatch: pytest.MonkeyPatch):
    cut_small(monkeypatch)
    layer = a_layer(window=window)
    check(some_texts(layer, [64, 65, 300], [1] * 3, device=DEVICE), True)


def test_several_lines_of_a_text_and_blocks_that_look_both_ways():
    texts = some_texts(a_layer(), [90, 70], [5, 3], [90, 90, 90, 90, 90, 68, 70, 70], device=DEVICE)
    check(texts, False)


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=2),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    head_width=st.sampled_from((8, 12, 16, 24, 32)),
    window=st.sampled_from((0, 1, 7, 130)),
    softcap=st.sampled_from((0.0, 2.0)),
    norm=st.booleans(),
    sinks=st.booleans(),
    new=st.booleans(),
    several=st.sampled_from((1, 2, 8)),
    many=st.sampled_from((0, 512)),
    pieces=st.sampled_from((4, 30)),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_random_shapes(
    lengths: list[int], group: int, kv_heads: int, new: bool, several: int, many: int, pieces: int,
    seed: int, **options: Any,
):  # fmt: skip
    layer = a_layer(heads=group * kv_heads, kv_heads=kv_heads, **options)
    texts = some_texts(layer, lengths, [1] * len(lengths), device=DEVICE, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch, pieces)
        patch.setattr(attention, "MANY_PROGRAMS", many)
        patch.setattr(attention, "SEVERAL", several)
        check(texts, new)


def test_narrow_numbers():
    """In 16 bits; not in bfloat16, since Triton's interpreter multiplies its bits."""
    layer = a_layer(norm=True)
    texts = some_texts(layer, [33, 150], [1, 1], dtype=torch.float16, device=DEVICE)
    for actual, expected_ in zip(run(texts, True), expected(texts), strict=True):
        torch.testing.assert_close(actual, expected_, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_the_same_bits_alone_and_together_fresh_or_stored(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    lengths = [3, 64, 200]
    texts = some_texts(a_layer(norm=True), lengths, [1] * 3, dtype=dtype, device=DEVICE)
    out = run(texts, True)[0]
    assert torch.equal(run(texts, False)[0], out)
    for n, length in enumerate(lengths):
        alone = texts.copy()
        alone.qkv = alone.qkv[n : n + 1]
        rows, only = texts.lines, slice(n, n + 1)
        alone.lines = attention.DecodeRows(
            rows.table, rows.table_rows[only], rows.positions[only], rows.ends[only]
        )
        few = num_pieces(texts.layer, length)
        assert torch.equal(run(alone, True, pieces=few)[0][0], out[n])
    monkeypatch.setattr(attention, "MANY_PROGRAMS", 0)
    assert torch.equal(run(texts, True)[0], out)


def test_room_for_the_pieces_of_every_length():
    for window in (0, 1, 64, 100, 5000):
        layer = a_layer(window=window)
        for length in (1, 64, 65, 2048, 2049, 4097, 100_000):
            first = max(0, length - window) if window else 0
            size = 1
            while -(-(length - first) // attention.TILE) > size * attention.PIECES:
                size *= 2
            size *= attention.TILE
            pieces = (length - 1) // size + 1 - first // size
            assert pieces <= num_pieces(layer, length) <= attention.MOST_PIECES
