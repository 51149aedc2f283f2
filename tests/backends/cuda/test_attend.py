"""Decode attention over pages against plain torch, run by Triton's interpreter without a GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.attention_support import Texts, a_layer, cut_small, expected, some_texts
from unspool.backends.cuda import attention
from unspool.backends.cuda.attention import chunk_tiles, decode_attention, num_pieces, store_keys

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
    "no rotary, sinks, one head each": {"rotary": 0, "sinks": True, "heads": 3, "kv_heads": 3},
    "window, softcap": {"window": 70, "softcap": 3.0, "heads": 3, "kv_heads": 1, "head_width": 8},
    "odd width, partial rotary, head norm": {"head_width": 20, "rotary": 10, "norm": True},
    "wide": {"heads": 2, "kv_heads": 1, "head_width": 80},
    "many a key head": {"heads": 20, "kv_heads": 1},
}


@pytest.mark.parametrize("name", LAYERS)
def test_as_plain_torch(name: str):
    check(some_texts(a_layer(**LAYERS[name]), [1, 65, 90], [1] * 3, device=DEVICE), True)


@pytest.mark.parametrize("window", (0, 150))
def test_long_texts_are_cut_into_pieces(window: int, monkeypatch: pytest.MonkeyPatch):
    cut_small(monkeypatch)
    layer = a_layer(2, 1, window=window)
    check(some_texts(layer, [64, 65, 300], [1] * 3, device=DEVICE), True)


def test_several_lines_of_a_text_and_blocks_that_look_both_ways():
    ends = [90, 90, 90, 68, 70]
    texts = some_texts(a_layer(2, 1), [90, 70], [3, 2], ends, device=DEVICE)
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
@settings(max_examples=4, deadline=None)
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
    layer = a_layer(2, 1, norm=True)
    texts = some_texts(layer, [33, 150], [1, 1], dtype=torch.float16, device=DEVICE)
    for actual, expected_ in zip(run(texts, True), expected(texts), strict=True):
        torch.testing.assert_close(actual, expected_, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_the_same_bits_alone_and_together_fresh_or_stored(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    lengths = [3, 64, 140]
    texts = some_texts(a_layer(2, 1, norm=True), lengths, [1] * 3, dtype=dtype, device=DEVICE)
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


# -- Attention of prompts over pages against plain torch, and bit for bit against decoding --------


def stored(texts: Texts) -> Texts:
    texts = texts.copy()
    store_keys(texts.qkv, texts.keys, texts.values, texts.layer, texts.lines, pdl=False)
    return texts


def prefill_run(texts: Texts, exact: bool = False) -> torch.Tensor:
    """The outcome for texts that are stored."""
    lines, out = texts.lines, texts.out
    slots = lines.table_rows.cpu().numpy()[texts.starts[:-1]].astype(np.int64)
    tiles = chunk_tiles(
        texts.starts, slots, lines.ends.cpu().numpy().astype(np.int64),
        attention.prefill_shape(texts.layer, texts.qkv.dtype, texts.qkv.device, exact),
    )  # fmt: skip
    attention.prefill_attention(
        texts.qkv, out, texts.keys, texts.values, texts.layer, lines,
        torch.from_numpy(tiles).to(DEVICE), exact=exact,
    )  # fmt: skip
    return out


def prefill_check(texts: Texts, exact: bool = False) -> None:
    narrow = texts.qkv.dtype != torch.float32
    close = 0.02 if narrow else 2e-5
    torch.testing.assert_close(
        prefill_run(stored(texts), exact), expected(texts)[0], rtol=close, atol=close
    )


PREFILL_LAYERS = {
    "plain": {},
    "head norm": {"norm": True},
    "window": {"window": 30},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "three a key head": {"heads": 6, "kv_heads": 2, "head_width": 8},
    "odd width": {"head_width": 20, "rotary": 10},
}


# All of them run on a GPU (tests/gpu); by the interpreter those that differ most.
_SHORT = (("sinks", False), ("three a key head", True))


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in _SHORT))
        for case in product(PREFILL_LAYERS, (False, True))
    ],
)
def test_prefill_as_plain_torch(name: str, exact: bool):
    """In 16 bits, where tensor cores are used: chunks with a past and without, of one token too."""
    layer = a_layer(**{"heads": 2, "kv_heads": 1, **PREFILL_LAYERS[name]})
    # Rows of a program and keys of a tile are exceeded; exact programs have far fewer rows.
    lengths, counts = ([70, 20, 1], [12, 20, 1]) if exact else ([70, 150, 1], [70, 5, 1])
    prefill_check(some_texts(layer, lengths, counts, dtype=torch.float16, device=DEVICE), exact)


def test_in_32_bits():
    prefill_check(some_texts(a_layer(2, 1), [20, 90], [20, 12], device=DEVICE))


def test_blocks_that_look_both_ways():
    ends = [50] * 15 + [70] * 25
    prefill_check(some_texts(a_layer(2, 1), [70], [40], ends, device=DEVICE))


@given(
    chunks=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=2),
    group=st.integers(1, 3),
    head_width=st.sampled_from((8, 16, 24)),
    window=st.sampled_from((0, 1, 7, 130)),
    softcap=st.sampled_from((0.0, 2.0)),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=2, deadline=None)
def test_the_bits_of_decoding(chunks: list[tuple[int, int]], group: int, seed: int, **options: Any):
    """Exact: a query gets the same bits alone and in a chunk, for any chunk border."""
    layer = a_layer(heads=group, kv_heads=1, **options)
    lengths, counts = [past + new for past, new in chunks], [new for _, new in chunks]
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        texts = some_texts(layer, lengths, counts, device=DEVICE, seed=seed, dtype=torch.float16)
        texts = stored(texts)
        out, scratch = texts.out, texts.scratch
        decode_attention(
            texts.qkv, out, texts.keys, texts.values, layer, texts.lines, scratch,
            new=False, pdl=False, pieces=num_pieces(layer, max(lengths)),
        )  # fmt: skip
        assert torch.equal(prefill_run(texts, exact=True), out)


def test_it_does_not_matter_where_a_chunk_began():
    layer = a_layer(2, 1)
    texts = stored(some_texts(layer, [90, 40], [70, 40], dtype=torch.float16, device=DEVICE))
    in_one = prefill_run(texts)
    cut = texts.copy()
    cut.starts = np.array([0, 37, 70, 80, 110])
    assert torch.equal(prefill_run(cut), in_one)


def test_programs_with_most_to_see_come_first():
    starts, slots = np.array([0, 5, 105]), np.array([4, 2])
    ends = np.concatenate((np.arange(996, 1001), np.arange(1, 101)))
    tiles = chunk_tiles(starts, slots, ends, attention.PrefillShape(3, 64))
    assert tiles.tolist() == [
        [0, 5, 0, 4], [5, 100, 256, 2], [5, 100, 192, 2], [5, 100, 128, 2], [5, 100, 64, 2],
        [5, 100, 0, 2],
    ]  # fmt: skip
