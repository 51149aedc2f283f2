"""Logits of a sequence are bit-identical for any chunks and any batch.

The guarantee "same seed, same text" depends on this. Each weight format has different kernels for 1
to 4 rows, up to 8, and more; attention has two variants, by context length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from helpers import paged_texts
from helpers.paged_texts import Library, RandomCheckpoint, batch_of, config, look, read, read_whole
from unspool import native
from unspool.backends.cpu.backend import CpuBackend
from unspool.backends.cpu.model import CpuModel
from unspool.backends.step import Floats, ObserveRequest
from unspool.model.config import LayerShape

pytestmark = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)

KINDS = [
    ("Q4_1", 16, False),
    ("Q8_0", 8, True),
    ("Q4_K", 16, False),
    ("Q6_K", 8, False),
    ("Q3_K", 16, False),
    ("BF16", 8, False),
    ("F32", 32, True),
]
NAMES = [f"{kind}-kv{bits}{'-experts' * experts}" for kind, bits, experts in KINDS]
# All that a layer may have beside the usual, as in Gemma 4.
EVERYTHING: dict[str, Any] = {
    "layers": 4, "windows": (40, 0, 40, 0), "kv_shared": 2, "keys_as_values": (1,),
    "shapes": tuple(
        LayerShape(heads=heads, kv_heads=kv_heads, head_width=64, ff_width=256)
        for heads, kv_heads in ((4, 2), (4, 1), (2, 2), (2, 1))
    ),
    "value_norm": True, "qk_norm": "head", "norm_after": True, "layer_scale": True,
    "dense_beside_experts": True, "token_width": 32, "query_growth": 0.2, "query_span": 50,
    "residual_scale": 0.7, "logit_scale": 1.5,
}  # fmt: skip
PAGES = 400
LONG = 540  # tokens: the past goes over a segment of 512


def new_backend(kind: str, kv_bits: int, experts: bool, threads: int) -> CpuBackend:
    shape: dict[str, Any] = {"width": 256, "ff_width": 256, "head_width": 64}
    if experts:
        shape |= {"experts": 3, "experts_per_token": 2, "expert_width": 256}
    if experts and kind == "Q8_0":
        shape |= EVERYTHING
    model = CpuModel(
        RandomCheckpoint(config(**shape), kind), store=None, threads=threads, kv_bits=kv_bits
    )
    page = model.backend(memory=1 << 20, context=2048).page_bytes
    return model.backend(memory=PAGES * page, context=2048)


class Case:
    """A model on two threads, a long sequence, and its logits from a single prefill."""

    def __init__(self, kind: str, kv_bits: int, experts: bool) -> None:
        self.parameters = kind, kv_bits, experts
        self.backend = new_backend(*self.parameters, threads=2)
        self.tokens = Library(PAGES, 67, seed=5).text(LONG).tokens
        self.expected = self.all_logits(self.backend, self.tokens, LONG)
        assert np.isfinite(self.expected).all() and self.expected.std() > 0.1

    @staticmethod
    def all_logits(backend: CpuBackend, tokens: list[int], chunk: int, seed: int = 0) -> Floats:
        return read_whole(backend, Library(PAGES, 67, seed).again(tokens), chunk)


@pytest.fixture(scope="module", params=KINDS, ids=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def assert_same_bits(result: Floats, expected: Floats) -> None:
    assert result.shape == expected.shape
    differs = (result.view(np.uint32) != expected.view(np.uint32)).any(axis=-1)
    assert not differs.any(), f"tokens {np.flatnonzero(differs)[:10]} of {len(differs)} differ"


def test_in_chunks_and_token_by_token(case: Case):
    assert_same_bits(case.all_logits(case.backend, case.tokens, 37, seed=1), case.expected)
    text = Library(PAGES, 67, seed=2).again(case.tokens)
    start = [read(case.backend, [(text, 1)])[0] for _ in range(20)]
    middle = read(case.backend, [(text, 485)])
    end = read_whole(case.backend, text, 1)  # from position 505 on: over the border
    assert_same_bits(np.concatenate([*start, *middle, end]), case.expected)


def test_on_one_thread(case: Case):
    alone = new_backend(*case.parameters, threads=1)
    assert_same_bits(case.all_logits(alone, case.tokens, LONG), case.expected)
    text = Library(PAGES, 67, seed=2).again(case.tokens)
    read(alone, [(text, 530)])
    assert_same_bits(read_whole(alone, text, 1), case.expected[530:])


def test_alone_and_among_up_to_forty(case: Case):
    """Batches of any size, with chunks of prompts and single tokens mixed, in any order."""
    library = Library(PAGES, 67, seed=3)
    chance = np.random.default_rng(4)
    texts = [library.text(int(length)) for length in chance.integers(1, 34, 39)]
    texts.append(library.again(case.tokens))
    result: dict[int, list[Floats]] = {number: [] for number in range(40)}
    sizes = iter([40, 1, 2, 3, 4, 5, 6, 7, 8, 9, 31] * 100)
    while unfinished := [n for n, text in enumerate(texts) if text.read < len(text.tokens)]:
        selection = chance.permutation(unfinished)[: next(sizes)].tolist()
        parts = []
        for number in selection:
            text = texts[number]
            most = 300 if len(text.tokens) == LONG and text.read < 500 else 9
            count = int(chance.choice([1, 1, 1, 2, most]))
            parts.append((text, min(count, len(text.tokens) - text.read)))
        for number, logits in zip(selection, read(case.backend, parts), strict=True):
            result[number].append(logits)
    assert_same_bits(np.concatenate(result[39]), case.expected)
    for number in range(0, 39, 3):
        alone = case.all_logits(case.backend, texts[number].tokens, 34, seed=6)
        assert_same_bits(np.concatenate(result[number]), alone)


def test_while_observed(case: Case):
    text = Library(PAGES, 67, seed=7).again(case.tokens)
    every = np.arange(530)
    taps = ObserveRequest(residuals=every[::50], attention=every[::50], parts=every[::90])
    start, inside = look(case.backend, [(text, 530)], taps)
    first = np.array([0])
    steps = [
        look(case.backend, [(text, 1)], ObserveRequest(residuals=first, attention=first))[0][0]
        for _ in range(10)
    ]
    assert_same_bits(np.concatenate([*start, *steps]), case.expected)
    assert inside is not None and inside.residuals is not None
    again = Library(PAGES, 67, seed=8).again(case.tokens)
    read(case.backend, [(again, 477)])
    _, later = look(case.backend, [(again, 30)], ObserveRequest(residuals=np.array([23])))
    assert later is not None and later.residuals is not None
    assert np.array_equal(inside.residuals[:, 10], later.residuals[:, 0]), "the taps see the same"


def test_on_copied_pages(case: Case):
    library = Library(PAGES, 67, seed=9)
    text = library.again(case.tokens)
    read(case.backend, [(text, 520)])
    copy = library.again(case.tokens)
    copy.read = 520
    tokens = [*text.tokens[:520], *[1] * 20]
    other = paged_texts.Text(tokens, text.pages, 520)  # writes into the first's pages
    copies = np.array(list(zip(text.pages, copy.pages, strict=True)))
    case.backend.launch(dataclasses.replace(batch_of([(other, 20)]), page_copies=copies))
    assert_same_bits(read_whole(case.backend, copy, 3), case.expected[520:])


def test_more_threads_than_work():
    """Eight threads on a model with a few blocks: most have nothing to do."""
    small = config(width=32, ff_width=32, vocab_size=5, heads=1, kv_heads=1, layers=1)
    result = []
    for threads in (1, 8):
        model = CpuModel(RandomCheckpoint(small), store=None, threads=threads, kv_bits=16)
        backend = model.backend(memory=1 << 20, context=128)
        text = Library(32, 5).text(60)
        first = read(backend, [(text, 55)])
        result.append(np.concatenate([*first, read_whole(backend, text, 1)]))
    assert_same_bits(*result)
