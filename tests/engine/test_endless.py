"""Texts longer than the context: what stays in view, and that nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import engine_support, null_model
from helpers.drafts_support import Says
from helpers.engine_support import letter, new_engine, nothing_leaks
from unspool import LanguageModel, SettingsError
from unspool.cli.main import _exit_code
from unspool.engine.request import (
    DraftTree,
    Request,
    num_truncated,
    parse_endless,
    truncation_note,
    visible_tokens,
)
from unspool.errors import ContextError
from unspool.lens.replay import replay
from unspool.lens.trace import load_trace, save_trace, trace_from, trace_of
from unspool.sampling import Chain, RowInput
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.monitors import BannedGuard

CONTEXT, KEPT, PROMPT, COUNT = 24, 3, (1, 2, 3, 4, 5), 60
SHAPE = {"pages": 60, "context": CONTEXT}


def request(sample: int = 0, **options: Any) -> Request:
    """A text longer than the context, sampled with a penalty."""
    return engine_support.request(
        PROMPT, COUNT, seed=3, settings={"repetition_penalty": 1.1},
        limits={"context": CONTEXT, "endless": KEPT, "sample": sample}, **options,
    )  # fmt: skip


def expected(submitted: Request) -> list[int]:
    """The text as a plain loop writes it that gives the model nothing but what is in view."""
    tokens, chain = list(submitted.prompt), Chain([submitted.settings])
    for _ in range(submitted.limits.max_tokens):
        logits = null_model.logits_after(visible_tokens(tokens, CONTEXT, KEPT), 40)
        row = RowInput(np.array(tokens), len(submitted.prompt), submitted.limits.sample)
        tokens.append(chain.pick(logits[None], [row])[0].token)
    return tokens[len(submitted.prompt) :]


def test_what_is_forgotten_follows_from_the_length_alone():
    lengths = range(1, 300)
    dropped = [num_truncated(n, CONTEXT, KEPT) for n in lengths]
    assert all(g == 0 for n, g in zip(lengths, dropped, strict=True) if n <= CONTEXT)
    assert all(b - a in (0, (CONTEXT - KEPT) // 2) for a, b in itertools.pairwise(dropped))
    for length in lengths:
        visible = visible_tokens(list(range(length)), CONTEXT, KEPT)
        assert len(visible) <= CONTEXT and visible[:KEPT] == list(range(min(KEPT, length)))
        assert visible[-1] == length - 1 and len(visible) > min(length, CONTEXT) // 2 - 1


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_endless_text_is_the_one_that_its_view_gives(overlaps: bool):
    running = new_engine(overlaps=overlaps, **SHAPE)
    streams = [running.submit(request(sample=n)) for n in range(3)]
    for number, stream in enumerate(streams):
        steps = list(stream)
        assert [step.token for step in steps] == expected(request(sample=number))
        assert [step.position for step in steps] == list(range(5, 5 + COUNT))
        assert steps[-1].finish_reason == "length"
        assert stream.notes == [truncation_note(5 + COUNT, CONTEXT, KEPT)]
    nothing_leaks(running)


def draft_tree(text: list[int]) -> Says:
    """Guesses right and wrong ones, as a tree."""

    def propose(tokens: Sequence[int]) -> DraftTree:
        follows = text[len(tokens) : len(tokens) + 4]
        wrong = [(token + 1) % 40 for token in follows[1:2]]
        return DraftTree([*follows, *wrong], [*range(-1, len(follows) - 1), *[0] * len(wrong)])

    return Says(propose)


@pytest.mark.parametrize("echoes", [False, True])
def test_drafts_and_guards_change_nothing(echoes: bool):
    plain = expected(request())
    drafter = draft_tree([*PROMPT, *plain])
    drafted = new_engine(echoes=echoes, **SHAPE).submit(request(drafter=drafter))
    assert [step.token for step in drafted] == plain
    assert drafted.accepted > COUNT // 2, "and the guesses were of use"

    # Take a pair of letters back just behind the first jump: the view goes back with the text.
    text = "".join(letter(token).decode() for token in plain)
    at = next(n for n in range(19, 40) if text.index(text[n : n + 2]) == n)
    policy = GuardPolicy((BannedGuard(words=(text[at : at + 2],), whole_words=False),), retries=50)
    seen_rows: list[Any] = []
    for step in new_engine(**SHAPE).submit(request(guards=policy)):
        del seen_rows[len(seen_rows) - (step.retracts or 0) :]
        seen_rows.append(step)
    assert len(seen_rows) == COUNT and [step.token for step in seen_rows][:at] == plain[:at]
    tokens = [*PROMPT, *(step.token for step in seen_rows)]
    for number in range(len(PROMPT), len(tokens)):  # every token is likely by its own view
        logits = null_model.logits_after(visible_tokens(tokens[:number], CONTEXT, KEPT), 40)
        logprob = logits[tokens[number]] - np.logaddexp.reduce(logits.astype(np.float64))
        assert seen_rows[number - len(PROMPT)].logprob == pytest.approx(logprob, abs=1e-4)


def test_going_on_and_long_prompts(tiny_lm: LanguageModel):
    lm = tiny_lm
    context = lm.context
    options: dict[str, Any] = {"seed": 5, "end": False, "endless": 6}
    full_text = lm.generate([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=context + 30, **options)
    half = lm.generate([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=context + 12, **options)
    assert half.resume(max_tokens=18).tokens == full_text.tokens
    prompt = [*full_text.prompt, *full_text.tokens[: context + 10]]
    again = lm.generate(prompt, max_tokens=16, **options)
    assert again.tokens == full_text.tokens[context + 10 : context + 26]
    with pytest.raises(SettingsError, match="more than half"):
        lm.generate([1], endless=context)
    with pytest.raises(ContextError, match="explain=True"):
        full_text.explained()


def test_a_trace_of_it_is_written_again(tmp_path: Path, tiny_lm: LanguageModel):
    written = tiny_lm.generate([1, 2, 3], max_tokens=160, seed=1, end=False, endless=True)
    file = tmp_path / "long.json"
    save_trace(trace_of(tiny_lm, written), file)
    trace = load_trace(file)
    assert trace.limits is not None and trace.limits.endless == 3
    assert replay(tiny_lm, trace).exact
    older = trace.to_dict()
    del older["limits"]["endless"]  # as it was before there was such a thing
    limits = trace_from(older).limits
    assert limits is not None and limits.endless is None


def test_a_head_cannot_follow():
    head: Any = Says(lambda tokens: [])
    head.reads, head.needs, head.see = (0,), lambda tokens: 0, lambda first, vectors: None
    with pytest.raises(SettingsError, match="lookup"):
        new_engine(**SHAPE).submit(request(drafter=head))


def test_what_may_be_asked():
    assert parse_endless(None, 5, 100) is parse_endless(False, 5, 100) is None
    assert parse_endless(True, 25, 100) == 25, "a short prompt stays"
    assert parse_endless(True, 26, 100) == 4
    assert parse_endless(50, 5, 100) == 50
    for wrong in (0, -1, 1.5, "yes", 51):
        with pytest.raises(SettingsError, match="endless"):
            parse_endless(wrong, 5, 100)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep", "4"), "add --endless"),
        (("--endless", "--keep", "0"), "endless must be"),
        (("--endless", "--beam", "2"), "--endless has no effect with --beam"),
        (("--endless", "--diffuse"), "--endless has no effect with --diffuse"),
    ],
)
def test_the_command_refuses_what_cannot_be(words: tuple[str, ...], message: str, capfd: Any):
    assert _exit_code(["run", "Hi", *words]) == 2
    assert message in capfd.readouterr().err
