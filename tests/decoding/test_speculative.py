"""Drafts: any drafter, the same text; the right distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drafts_support import (
    UNCHANGED,
    Says,
    a_request,
    alike,
    fake_engine,
    garbage,
    leftover,
    step_facts,
    table,
)
from unspool.backends.step import StepLimits
from unspool.backends.torch.backend import TorchBackend
from unspool.decoding.speculative.controller import AdaptiveDrafter
from unspool.decoding.speculative.drafters import (
    ModelDrafter,
    PredictedText,
    PromptLookup,
    check_same_vocabulary,
    drafter_from,
    make_drafter,
)
from unspool.engine.engine import Engine
from unspool.engine.generation import Generation
from unspool.engine.request import Request
from unspool.engine.sequence import Sequence as WrittenText
from unspool.errors import SettingsError
from unspool.sampling import rows

OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "seed": st.integers(0, 5),
        "max_tokens": st.integers(0, 40),
        "context": st.sampled_from([64, 20]),
        "end_ids": st.sampled_from([frozenset(), frozenset([3])]),
        "stop": st.sampled_from([(), ("bd",), ("dfh", "ccc")]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "mirostat_tau": st.sampled_from([0.0, 2.0]),
    }
)
TOKENS = st.one_of(st.integers(0, 11), st.integers(-3, 14), st.sampled_from([1 << 40, -(1 << 70)]))
GUESSES = st.lists(st.lists(TOKENS, max_size=70), max_size=12)


@settings(max_examples=30, deadline=None)
@given(options=OPTIONS, guesses=GUESSES, prompt=st.lists(st.integers(0, 11), min_size=1))
def test_no_drafter_changes_the_text(
    letters: Engine, options: dict[str, Any], guesses: list[list[int]], prompt: list[int]
):
    prompt = prompt[: options["context"]]
    plain = list(letters.submit(a_request(prompt, **options)))
    output = iter(guesses)
    drafters = [
        Says(lambda tokens: next(output, [])),
        PromptLookup(shortest=1),
        AdaptiveDrafter(PromptLookup()),
        PredictedText([0, 2, 4, 6, 8, 10, *range(12)], start=len(prompt)),
    ]
    for drafter in drafters:
        steps = list(letters.submit(a_request(prompt, drafter, **options)))
        assert step_facts(steps) == step_facts(plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_is_always_right_and_seen_in_the_steps(letters: Engine, temperature: float):
    options = {"temperature": temperature, "seed": 3, "max_tokens": 30}
    plain = list(letters.submit(a_request([1, 2], **options)))
    full = [1, 2, *(step.token for step in plain)]
    runs = letters.steps
    oracle = Says(lambda tokens: full[len(tokens) : len(tokens) + 4])
    steps = list(letters.submit(a_request([1, 2], oracle, **options)))
    assert step_facts(steps) == step_facts(plain)
    assert letters.steps - runs == 7, "1 for the prompt, then 5 tokens at a time"
    assert Counter(step.draft for step in steps) == {"accepted": 23, None: 7}
    liar = Says(lambda tokens: [(full[len(tokens)] + 1) % 12])
    steps = list(letters.submit(a_request([1, 2], liar, **options)))
    assert step_facts(steps) == step_facts(plain)
    # Neither the first token (no draft yet) nor the last one (nothing follows) had a draft.
    assert [step.draft for step in steps] == [None, *["rejected"] * 28, None]
    assert {(p, a) for p, a, _ in liar.rounds} == {(1, 0)}


def test_every_round_is_told_with_its_time(letters: Engine):
    turn = itertools.count()
    drafter = Says(lambda tokens: [0, 0] if next(turn) % 2 else [])
    steps = list(letters.submit(a_request([1], drafter, max_tokens=12, temperature=0)))
    assert sum(accepted + 1 for _, accepted, _ in drafter.rounds) >= len(steps) - 3
    assert {proposed for proposed, _, _ in drafter.rounds} >= {0, 2}
    assert all(seconds > 0 for _, _, seconds in drafter.rounds)
    assert sum(seconds for _, _, seconds in drafter.rounds) <= sum(step.seconds for step in steps)


@pytest.mark.parametrize("broken", ["propose", "learn", "rubbish"])
def test_a_drafter_that_fails_is_asked_no_more(letters: Engine, broken: str):
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of ideas")

    drafter: Any = Says(lambda tokens: [1])
    if broken == "rubbish":
        drafter = Says(lambda tokens: ["never"])
    else:
        setattr(drafter, broken, fail)
    plain = list(letters.submit(a_request([4, 5])))
    stream = letters.submit(a_request([4, 5], drafter))
    assert step_facts(list(stream)) == step_facts(plain)
    assert len(stream.notes) == 1 and stream.notes[0].startswith("drafting stopped: the drafter")


@pytest.mark.parametrize("page_count", [17, 40])
def test_drafts_in_little_memory(letters: Engine, page_count: int):
    """Texts alike push each other aside and find each other's pages, drafts among them."""
    tight = fake_engine(np.exp(letters.backend.logits.astype(float)), page_count=page_count)
    requests = [
        a_request([number % 3, 1], PromptLookup(shortest=1), max_tokens=60, temperature=0.5)
        for number in range(12)
    ]
    streams = [tight.submit(request) for request in requests]
    for request, stream in zip(requests, streams, strict=True):
        plain = letters.submit(replace(request, drafter=None))
        assert step_facts(list(stream)) == step_facts(list(plain))
    assert tight.scheduler.preemptions > 0 or page_count == 40
    assert leftover(tight) == 0
    tight.close()


DRAFTERS: dict[str, Callable[[Request], Any]] = {
    "likeliest": lambda request: Says(lambda tokens: [0, 1]),
    "lookup": lambda request: PromptLookup(shortest=1),
    "garbage": lambda request: garbage(request.limits.sample, 3),
    "adaptive": lambda request: AdaptiveDrafter(Says(lambda tokens: [0, 1, 2])),
}


def take_every_possible_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake: a drafted token is kept if it is possible at all."""
    accept = WrittenText.accept

    def lenient(self: Any, token: int, logprob: float, pick: Any) -> bool:
        draft = self.drafting.draft
        if draft.num_accepted < len(draft.main_tokens):
            likely = {c.token for c in pick.candidates if c.probability > 0}
            if draft.main_tokens[draft.num_accepted] in likely:
                token = draft.main_tokens[draft.num_accepted]
                pick = replace(pick, token=token)
        return accept(self, token, logprob, pick)

    monkeypatch.setattr(WrittenText, "accept", lenient)


def one_draw_for_a_whole_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake: every token of a run is picked by the draw of the run's first."""
    row = WrittenText.row_input
    monkeypatch.setattr(
        WrittenText,
        "row_input",
        lambda self: replace(row(self), position=self.length - self.drafting.draft.num_accepted),
    )


def the_draw_after_a_rejection_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake: a token behind a rejected one is picked by the rejected one's draw."""
    row, before = WrittenText.row_input, {}

    def stale(self: Any) -> Any:
        written = row(self)
        draft = self.drafting.draft
        if draft.num_accepted == 0 and before.get(id(self)) == self.length - 1:
            written = replace(written, position=self.length - 1)
        if draft.main_tokens:
            before[id(self)] = self.length
        return written

    monkeypatch.setattr(WrittenText, "row_input", stale)


MISTAKES = [take_every_possible_draft, one_draw_for_a_whole_draft, the_draw_after_a_rejection_again]


def count_out(monkeypatch: pytest.MonkeyPatch, make: Callable[[Request], Any]) -> dict[str, int]:
    """By how much the texts differ from what every draw, taken once, must give.

    Vocabulary 3 and probabilities in eighths: the middle of each eighth of [0,1) stands for all
    of it, so 8³ samples are the whole integral over the draws of three tokens.
    """

    def every_draw(_: Any, samples: Any, positions: Any, stream: int = 0) -> Any:
        digits = [s // 8 ** (p - 2) % 8 for s, p in zip(samples, positions, strict=True)]
        return (np.array(digits) + 0.5) / 8

    monkeypatch.setattr(rows, "uniforms", every_draw)
    probabilities = table(3)
    engine = fake_engine(probabilities, page_count=1 << 14)
    streams = [
        engine.submit(a_request([0, 1], make, sample=sample, max_tokens=3, top=3, **UNCHANGED))
        for sample in range(8**3)
    ]
    result = Counter(tuple(step.token for step in stream) for stream in streams)
    engine.close()
    off = {}
    for text in itertools.product(range(3), repeat=3):
        full = (0, 1, *text)
        exact = np.prod([probabilities[full[n : n + 3]] for n in range(3)]) * 8**3
        if result[text] != round(exact):
            off[str(text)] = result[text] - round(exact)
    return off


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_draw_counted_out(monkeypatch: pytest.MonkeyPatch, name: str):
    assert count_out(monkeypatch, DRAFTERS[name]) == {}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_counting_out_finds_mistakes(monkeypatch: pytest.MonkeyPatch, mistake: Any):
    mistake(monkeypatch)
    assert count_out(monkeypatch, DRAFTERS["likeliest"])


def generate(lm: Any, prompt: Sequence[int], drafter: Any, **options: Any) -> Generation:
    request = a_request(prompt, drafter, context=lm.context, **options)
    generation = Generation(request, source=lm)
    for _ in generation.extend(lm.engine.submit(request)):
        pass
    return generation


MAKERS: dict[str, Callable[[Any], Any]] = {
    "lookup": lambda lm: lambda request: PromptLookup(shortest=1),
    "adaptive": lambda lm: make_drafter("lookup:8", lm),
    "model": lambda lm: lambda request: ModelDrafter(lm, request, most=5),
    "garbage": lambda lm: lambda request: garbage(1, 259),
    "predicted": lambda lm: lambda request: PredictedText(range(250), start=7),
}


@pytest.mark.parametrize(
    ("name", "temperature"), [*((name, 0.9) for name in MAKERS), ("lookup", 0.0), ("model", 0.0)]
)
def test_a_tiny_model_writes_the_same(tiny_lm: Any, name: str, temperature: float):
    prompt = [5, 6, 7, 8, 5, 6, 7]
    options = {"temperature": temperature, "seed": 1, "max_tokens": 31, "sample": 1}
    plain = generate(tiny_lm, prompt, None, **options)
    drafted = generate(tiny_lm, prompt, MAKERS[name](tiny_lm), **options)
    assert alike(drafted.steps, plain.steps)
    if name == "model":  # the same model with the same draws can only agree
        assert "rejected" not in {step.draft for step in drafted.steps}
        assert Counter(step.draft for step in drafted.steps)["accepted"] == 25
    assert alike(drafted.rewind(20).resume().steps, plain.steps)
    other = drafted.rewind(10).choose(9).resume(max_tokens=12)
    assert alike(other.steps, plain.rewind(10).choose(9).resume(max_tokens=12).steps)
    assert leftover(tiny_lm.engine) == 0


def test_a_model_reads_a_long_prompt_in_pieces(tiny_lm: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TorchBackend, "limits", StepLimits(prefill_tokens=16))
    prompt = [n % 250 for n in range(60)]
    plain = generate(tiny_lm, prompt, None, temperature=0.8, max_tokens=20)
    drafted = generate(
        tiny_lm, prompt, lambda r: ModelDrafter(tiny_lm, r), temperature=0.8, max_tokens=20
    )
    assert alike(drafted.steps, plain.steps)
    assert [step.draft for step in drafted.steps[:5]] == [None, None, None, None, "accepted"]


def test_drafts_at_the_end_of_the_context(tiny_lm: Any):
    prompt = [7, 8, 9] * 40
    for maker in MAKERS.values():
        created = generate(tiny_lm, prompt, maker(tiny_lm), temperature=0, max_tokens=500)
        assert created.finish_reason == "context" and len(created.tokens) == 8


def test_words(tiny_lm: Any):
    created = make_drafter("lookup", tiny_lm)
    assert callable(created) and make_drafter("lookup", tiny_lm) is created, "got ready once"
    item, other = created(a_request([1])), created(a_request([1]))
    assert item is not other, "a drafter serves one text"
    lookup = PromptLookup()
    assert make_drafter(lookup, tiny_lm) is lookup and make_drafter(None, tiny_lm) is None
    loaded = []
    make = drafter_from("model:some/where:3", tiny_lm, lambda path: loaded.append(path) or tiny_lm)
    assert loaded == ["some/where"]
    drafter = make(a_request([1, 2]))
    assert isinstance(drafter, AdaptiveDrafter) and drafter.longest == 3
    for wrong in ("", "lookup:x", "lookup:0", "luck", "model:", "corpus:x", "model:x"):
        with pytest.raises(SettingsError, match="speculate is"):
            drafter_from(wrong, tiny_lm)
    with pytest.raises(SettingsError, match="speculate is 7"):
        make_drafter(7, tiny_lm)  # type: ignore[arg-type]


def test_models_with_other_vocabularies_are_refused(tiny_lm: Any):
    class Words(dict[int, bytes]):
        token_bytes = dict.__getitem__

        def token_text(self, token: int) -> str:
            return self[token].decode()

    def model(*words: bytes) -> Any:
        return SimpleNamespace(tokenizer=Words(enumerate(words)))

    check_same_vocabulary(tiny_lm, tiny_lm)
    check_same_vocabulary(model(b"a", b"b"), model(b"a", b"b"))
    with pytest.raises(SettingsError, match="token 1 is 'c' to the draft model and 'b'"):
        check_same_vocabulary(model(b"a", b"c"), model(b"a", b"b"))
    with pytest.raises(SettingsError, match="has 1 tokens and the model's 2"):
        check_same_vocabulary(model(b"a"), model(b"a", b"b"))
    with pytest.raises(SettingsError, match="one of them has no vocabulary"):
        check_same_vocabulary(tiny_lm, model(b"a"))


def test_a_model_drafts_for_itself(lm: Any):
    ids = lm.tokenizer.encode("The sky is")
    check_same_vocabulary(lm, lm)
    plain = generate(lm, ids, None, temperature=0.9, seed=4, max_tokens=13)
    make = lambda request: ModelDrafter(lm, request, most=3)  # noqa: E731
    drafted = generate(lm, ids, make, temperature=0.9, seed=4, max_tokens=13)
    assert alike(drafted.steps, plain.steps)
    assert [s.draft for s in drafted.steps] == [None, *(["accepted"] * 3 + [None]) * 3]
