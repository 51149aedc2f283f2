"""Attention of prompts over pages against plain torch, and bit for bit against decoding."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.attention_support import Texts, a_layer, cut_small, expected, some_texts
from unspool.backends.cuda.attention import (
    chunk_tiles,
    decode_attention,
    num_pieces,
    prefill_attention,
    prefill_rows,
    store_keys,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stored(texts: Texts) -> Texts:
    texts = texts.copy()
    store_keys(texts.qkv, texts.keys, texts.values, texts.layer, texts.lines, pdl=False)
    return texts


def run(texts: Texts, exact: bool = False) -> torch.Tensor:
    """The outcome for texts that are stored."""
    lines, out = texts.lines, texts.out
    slots = lines.table_rows.cpu().numpy()[texts.starts[:-1]].astype(np.int64)
    tiles = chunk_tiles(
        texts.starts, slots, lines.ends.cpu().numpy().astype(np.int64), texts.layer,
        prefill_rows(texts.qkv.dtype, exact),
    )  # fmt: skip
    prefill_attention(
        texts.qkv, out, texts.keys, texts.values, texts.layer, lines,
        torch.from_numpy(tiles).to(DEVICE), exact=exact,
    )  # fmt: skip
    return out


def check(texts: Texts, exact: bool = False) -> None:
    narrow = texts.qkv.dtype != torch.float32
    close = 0.02 if narrow else 2e-5
    torch.testing.assert_close(
        run(stored(texts), exact), expected(texts)[0], rtol=close, atol=close
    )


LAYERS = {
    "plain": {},
    "head norm": {"norm": True},
    "window": {"window": 30},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "three a key head": {"heads": 9, "kv_heads": 3, "head_width": 8},
    "odd width": {"head_width": 20, "rotary": 10},
}


# All of them run on a GPU (tests/gpu); by the interpreter those that differ most.
_SHORT = (("sinks", False), ("three a key head", True))


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in _SHORT))
        for case in product(LAYERS, (False, True))
    ],
)
def test_as_plain_torch(name: str, exact: bool):
    """In 16 bits, where tensor cores are used: chunks with a past and without, of one token too."""
    layer = a_layer(**LAYERS[name])
    lengths, counts = [100, 150, 70, 1], [100, 90, 1, 1]
    check(some_texts(layer, lengths, counts, dtype=torch.float16, device=DEVICE), exact)


def test_in_32_bits():
    check(some_texts(a_layer(), [60, 90], [20, 30], device=DEVICE))


def test_blocks_that_look_both_ways():
    ends = [20] * 15 + [50] * 30 + [70] * 25
    texts = some_texts(a_layer(), [70], [70], ends[:70], device=DEVICE)
    check(texts)


@given(
    chunks=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=2),
    group=st.integers(1, 3),
    head_width=st.sampled_from((8, 16, 24)),
    window=st.sampled_from((0, 1, 7, 130)),
    softcap=st.sampled_from((0.0, 2.0)),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=5, deadline=None)
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
        assert torch.equal(run(texts, exact=True), out)


@pytest.mark.parametrize("exact", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_it_does_not_matter_where_a_chunk_began(exact: bool):
    texts = stored(some_texts(a_layer(), [90, 40], [70, 40], dtype=torch.float16, device=DEVICE))
    in_one = run(texts, exact)
    cut = texts.copy()
    cut.starts = np.array([0, 37, 60, 70, 80, 110])
    assert torch.equal(run(cut, exact), in_one)


def test_programs_with_most_to_see_come_first():
    layer = a_layer(heads=6, kv_heads=2)
    starts, slots = np.array([0, 5, 105]), np.array([4, 2])
    ends = np.concatenate((np.arange(996, 1001), np.arange(1, 101)))
    tiles = chunk_tiles(starts, slots, ends, layer, 64)
    assert tiles.tolist() == [
        [0, 5, 0, 4], [5, 100, 256, 2], [5, 100, 192, 2], [5, 100, 128, 2], [5, 100, 64, 2],
        [5, 100, 0, 2],
    ]  # fmt: skip
