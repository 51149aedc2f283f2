"""Requests with interventions in the engine: the same text alone and in any company, and nothing
steered is found by others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import null_model
from helpers.drafts_support import Says
from helpers.engine_support import new_engine, nothing_leaks, request
from unspool.backends.interventions import (
    NATIVE_SITES,
    Add,
    Intervention,
    ProjectOut,
    Replace,
    Scale,
    SpanCollector,
    resolve,
)
from unspool.backends.step import StepLimits
from unspool.engine.reference import write
from unspool.engine.request import Request

VOCABULARY = 40
CHOICES: list[Intervention] = [
    Intervention("resid_post", Add([1.0, 2.0])),
    Intervention("resid_post", Add([1.0, 2.0]), positions=slice(7, None)),
    Intervention("resid_post", Add([1.0, 2.5]), positions="generated"),
    Intervention("mlp_out", Scale(0), positions=range(3, 9)),
    Intervention("mlp_out", Scale(0), positions="last"),
    Intervention("attn_out", Replace(np.ones((1, 4, 2))), positions=range(2, 6)),
    Intervention("logits", ProjectOut([1.0, 0.0])),
    Intervention("embedding", Scale(0.5), positions=11),
]


def engine_of(**shape: Any) -> Any:
    return new_engine(sites=NATIVE_SITES, **shape)


def expected(submitted: Request) -> list[int]:
    """What the plain loop writes: each token of the past as its interventions change it."""
    resolved = submitted.branch_interventions()

    class Text:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def append(self, tokens: Any) -> Any:
            self.tokens += list(tokens)
            past = np.array(self.tokens)
            if resolved is not None:
                collector = SpanCollector()
                collector.add(resolved, 0, len(past), 0)
                past += null_model.marks_of(collector.build(), len(past))
            return null_model.logits_after(past, VOCABULARY)

    steps = write(
        Text(), submitted.prompt, submitted.settings, submitted.limits, lambda token: b"x"
    )
    return [step.token for step in steps]


def tokens_of(stream: Any) -> list[int]:
    return [step.token for step in stream]


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=14),  # prompts that often start alike
        st.lists(st.sampled_from(CHOICES), max_size=3, unique=True),
        st.booleans(),  # speculative decoding
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(
    texts=REQUESTS,
    pages=st.integers(12, 60),
    overlaps=st.booleans(),
    chunk=st.sampled_from([3, 256]),
)
def test_alone_and_in_any_company(texts: Any, pages: int, overlaps: bool, chunk: int):
    """Mixed rows, chunked prefill, preemption, drafts, cached prefixes of other requests."""
    limits = StepLimits(prefill_tokens=chunk, prefill_beside_decode=chunk)
    engine = engine_of(pages=pages, overlaps=overlaps, limits=limits)
    submitted = [
        request(
            prompt,
            9,
            seed=seed,
            interventions=tuple(chosen),
            drafter=Says(lambda tokens: [0, 1, 2]) if drafts else None,
        )
        for seed, (prompt, chosen, drafts) in enumerate(texts)
    ]
    for _ in range(2):  # the second time, much is cached
        streams = [engine.submit(item) for item in submitted]
        for item, stream in zip(submitted, streams, strict=True):
            assert tokens_of(stream) == expected(item)
    nothing_leaks(engine)
    engine.loop.close()


def reused(engine: Any, prompt: list[int], chosen: list[Intervention]) -> int:
    resolved = resolve(tuple(chosen), len(prompt))
    branch = engine.open(prompt, interventions=resolved)
    count = branch.num_reused
    engine.extend(branch)
    branch.release()
    return int(count)


def test_pages_are_shared_up_to_the_first_touched_token():
    engine, prompt = engine_of(), list(range(30))
    everywhere, later = CHOICES[0], CHOICES[1]
    assert reused(engine, prompt, []) == 0
    assert reused(engine, prompt, [later]) == 7  # in the middle of a page
    assert reused(engine, prompt, [everywhere]) == 0
    assert reused(engine, prompt, []) == reused(engine, prompt, [later]) == 29
    assert reused(engine, prompt, [everywhere]) == 29
    twin = Intervention("resid_post", Add([1.0, 2.0]))  # another object with the same content
    assert reused(engine, prompt, [twin]) == 29
    assert reused(engine, prompt, [Intervention("resid_post", Add([1.0, 2.1]))]) == 0
    assert reused(engine, prompt, [everywhere, everywhere]) == 0  # twice is another thing
    # The same values from 7 on, and no further than the text goes: the same keys and values.
    assert (
        reused(
            engine, prompt, [Intervention("resid_post", Add([1.0, 2.0]), positions=range(7, 90))]
        )
        == 29
    )
    # What happens after the last layer changes no keys and values.
    assert reused(engine, prompt, [CHOICES[6]]) == 29
    engine.loop.close()


def test_forks_and_rewinds_keep_interventions():
    engine, prompt = engine_of(), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    resolved = resolve((CHOICES[1],), len(prompt))
    assert resolved is not None

    def logits(tokens: list[int], steered: bool) -> Any:
        past = np.array(tokens)
        if steered:
            collector = SpanCollector()
            collector.add(resolved, 0, len(past), 0)
            past += null_model.marks_of(collector.build(), len(past))
        return null_model.logits_after(past, VOCABULARY)

    branch, plain = engine.open(prompt, interventions=resolved), engine.open(prompt)
    assert np.array_equal(branch.append([])[0], logits(prompt, True))
    assert np.array_equal(plain.append([])[0], logits(prompt, False))
    fork = branch.fork()
    fork.rewind(6)
    fork.append([8, 8, 8])
    assert np.array_equal(fork.append([7])[0], logits([*prompt[:6], 8, 8, 8, 7], True))
    assert fork.tokens == [*prompt[:6], 8, 8, 8, 7] and branch.tokens == prompt
    again = engine.open(fork.tokens)
    assert again.num_reused == 7 and again.tokens == fork.tokens
    assert np.array_equal(again.append([])[0], logits(fork.tokens, False))
    for opened in (branch, plain, fork, again):
        opened.release()
    nothing_leaks(engine)
    engine.loop.close()


def test_an_endless_text_keeps_its_positions():
    """When the oldest tokens are dropped, positions stay those of the whole text."""
    chosen = (Intervention("mlp_out", Scale(0), positions=range(2, 12)), CHOICES[2])
    kept = resolve(chosen, 8, num_kept=4, dropped=5)
    assert kept is not None
    spans = [(span.index, span.start, span.end) for span in kept.spans]
    # Tokens 0 to 3 and from 9 on are visible; 9 is now at 4.
    assert spans[:3] == [(0, 2, 4), (0, 4, 7), (1, 4, (1 << 62) - 5)]
    values = Replace(np.ones((1, 10, 2)))
    moved = resolve((Intervention("attn_out", values, positions=range(2, 12)),), 8, 4, 5)
    assert moved is not None
    assert [(s.start, s.end, s.offset) for s in moved.spans] == [(2, 4, 0), (4, 7, 7)]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_request_that_fails_harms_nobody(overlaps: bool):
    engine = engine_of(overlaps=overlaps)
    one = request([1, 2, 3], 12, interventions=(CHOICES[0],))
    stream = engine.submit(one)
    next(stream)
    stream.close()
    other = request([1, 2, 3], 12)
    assert tokens_of(engine.submit(other)) == expected(other)
    nothing_leaks(engine)
    engine.loop.close()
