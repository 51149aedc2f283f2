"""The GPU's backend by Triton's interpreter, on the CPU: the numbers of the plain backend.

Tiny models and few tokens, as the interpreter is slow; tests/gpu has every family on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_support import (
    PAGES,
    backend,
    check_picks,
    difference,
    family,
    language_model,
    ours,
    pick_rows,
    plain,
    prompts,
    read_in_many_ways,
    written,
)
from paged_texts import Library, RandomCheckpoint, batch_of, config, look

from unspool.backends.step import Look
from unspool.sampling import SamplingSettings

pytest.importorskip("triton")

CLOSE = 2e-4
SMALL = config(layers=1, context=128)
# Between them: biases, learned positions, layer norms, windows, soft caps, norms behind, norms of
# queries and keys, parts of heads turned, layers in parallel, experts.
FAMILIES = ["gpt2", "gemma2", "qwen3-moe", "gpt-neox", "olmo2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_however_the_tokens_arrive(name: str, tmp_path: Path):
    checkpoint = family(name, tmp_path)
    theirs, mine = (read_in_many_ways(backend(make(checkpoint)), 259) for make in (plain, ours))
    assert theirs.std() > 0.5, "a model that says nothing would prove nothing"
    assert difference(mine, theirs) < CLOSE


def test_looks_beside_a_text_that_is_written():
    found = []
    for make in (plain, ours):
        running, library = backend(make(RandomCheckpoint(SMALL))), Library(PAGES, SMALL.vocab_size)
        a, b = library.text(20), library.text(21)
        look(running, [(a, 19)], None)
        taps = Look(
            residuals=np.array([0, 3, 21]), attention=np.array([5, 21]), parts=np.array([4])
        )
        found.append(look(running, [(b, 21), (a, 1)], taps))
    (theirs, their_inside), (mine, my_inside) = found
    assert their_inside is not None and my_inside is not None
    assert difference(np.concatenate(mine), np.concatenate(theirs)) < CLOSE
    assert difference(my_inside.residuals, their_inside.residuals) < CLOSE
    assert difference(my_inside.parts, their_inside.parts) < CLOSE
    for my_rows, their_rows in zip(my_inside.attention, their_inside.attention, strict=True):
        assert difference(my_rows, their_rows) < CLOSE


def test_a_step_picks_what_the_chain_picks_and_the_next_may_begin_with_it():
    running, library = backend(ours(RandomCheckpoint(SMALL))), Library(PAGES, SMALL.vocab_size)
    asked = [
        SamplingSettings(temperature=0),
        SamplingSettings(temperature=0.9, top_k=0, seed=5),
        SamplingSettings(temperature=1.3, top_p=0.8, min_p=0, seed=-7),
    ]
    texts = [library.text(30) for _ in asked]
    batch = batch_of([(text, 18 if number else 2) for number, text in enumerate(texts)])
    last = batch.starts[1:] - 1
    sampled = replace(batch, sampled=last, pick=pick_rows(asked, [2, 18, 18]), logits=last)
    check_picks(running, sampled)
    first = running.launch(sampled)
    for number, text in enumerate(texts):
        text.read = 18 if number else 2
        text.tokens[text.read] = -1 - number
    ahead = batch_of([(text, 1) for text in texts])
    second = running.launch(ahead).result()
    picked = first.result().tokens
    known = replace(ahead, tokens=picked)
    again = running.launch(known).result()
    assert difference(second.logits, again.logits) == 0


@pytest.mark.parametrize("options", [{"temperature": 0}, {"repetition_penalty": 1.2}], ids=str)
def test_texts_through_the_engine_are_those_of_the_plain_backend(options: dict[str, float]):
    checkpoint = RandomCheckpoint(SMALL)
    asked = prompts(3, SMALL.vocab_size, longest=20)
    with (
        language_model(plain(checkpoint), memory=1 << 20) as cpu,
        language_model(ours(checkpoint), memory=1 << 20) as gpu,
    ):
        assert written(gpu, asked, max_tokens=4, **options) == written(
            cpu, asked, max_tokens=4, **options
        )


def test_exact_rows_are_the_same_to_the_last_bit_alone_and_beside_others():
    running = backend(ours(RandomCheckpoint(SMALL), exact=True))
    found = []
    for others in (0, 1, 4):
        library = Library(PAGES, SMALL.vocab_size)
        text, beside = library.text(20), [library.text(20) for _ in range(others)]
        rows = look(running, [(text, 17), *((one, 17) for one in beside)], None)[0]
        later = look(running, [(text, 1), *((one, 1) for one in beside)], None)[0]
        found.append(np.concatenate((rows[0], later[0])))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
