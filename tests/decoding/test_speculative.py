"""Drafts: any drafter, the same text; the right distribution; they stop when they do not pay."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_backend import FakeBackend
from unspool.backends.base import StepLimits
from unspool.backends.torch.paged import TorchBackend
from unspool.decoding.adaptive import FIRST_REST, HOPELESS, Adaptive
from unspool.decoding.speculative import (
    Corpus,
    CorpusDrafter,
    ModelDrafter,
    PromptLookup,
    check_same_vocabulary,
    drafter_from,
    make_drafter,
)
from unspool.engine.ending import Limits
from unspool.engine.engine import Engine
from unspool.engine.generation import Generation
from unspool.engine.request import Request
from unspool.engine.sequence import Sequence as WrittenText
from unspool.engine.steps import Step
from unspool.errors import SettingsError
from unspool.sampling import SamplingSettings, rows

UNCHANGED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}  # the model's own


class Says:
    """Proposes what a function of the text says; keeps what it was told."""

    def __init__(self, say: Callable[[Sequence[int]], Any]) -> None:
        self.say = say
        self.told: list[tuple[int, int, float]] = []

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        found: list[int] = self.say(tokens)
        return found

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        self.told.append((proposed, accepted, seconds))
        return None


def garbage(seed: int, vocabulary: int, longest: int = 6) -> Says:
    """Random tokens, some of them impossible, sometimes more than asked for."""
    chance = np.random.default_rng(seed)

    def say(tokens: Sequence[int]) -> list[int]:
        count = int(chance.integers(0, longest))
        found: list[int] = chance.integers(0, vocabulary, count).tolist()
        if chance.random() < 0.1:
            found += [vocabulary + 3, -1, 1 << 70]
        return found

    return Says(say)


def table(vocabulary: int, seed: int = 0) -> Any:
    """A distribution after each pair of tokens; in eighths, so that it can be counted out."""
    chance = np.random.default_rng(seed)
    cells = chance.integers(0, vocabulary, (vocabulary, vocabulary, 8))
    cells = np.minimum(cells, chance.integers(0, vocabulary, cells.shape))
    return np.stack([(cells == token).mean(-1) for token in range(vocabulary)], -1)


def fake_engine(probabilities: Any, **options: Any) -> Engine:
    backend = FakeBackend(probabilities, **options)
    letter = lambda token: bytes([97 + token % 26])  # noqa: E731
    return Engine(backend, letter, max_waiting=1 << 20)


@pytest.fixture(scope="module")
def letters() -> Iterator[Engine]:
    """Twelve letters that like to repeat themselves, so that drafts are often right."""
    probabilities = 0.15 * np.random.default_rng(5).dirichlet([0.3] * 12, (12, 12))
    for a, b in itertools.product(range(12), repeat=2):
        probabilities[a, b, (2 * b - a + 1) % 12] += 0.85
    engine = fake_engine(probabilities)
    yield engine
    engine.close()


def a_request(prompt: Sequence[int], drafter: Any = None, **options: Any) -> Request:
    limits = {name: options.pop(name) for name in LIMITS if name in options}
    limits = {"max_tokens": 40, "context": 64, **limits}
    return Request(
        prompt=tuple(prompt),
        settings=SamplingSettings(**options),
        limits=Limits(**limits),
        drafter=drafter,
    )


LIMITS = ("max_tokens", "context", "end_ids", "stop", "sample", "top", "explain")


def told(steps: Sequence[Step]) -> list[tuple[Any, ...]]:
    """All of a step that drafts may not change (the clock, and what the draft said)."""
    return [(s.token, s.text, s.position, s.finish_reason, s.draw, s.probability) for s in steps]


def alike(one: Sequence[Step], other: Sequence[Step]) -> bool:
    """The same but for rounding: a run of many tokens adds its numbers up in another order."""
    same = [(s.token, s.text, s.position, s.finish_reason) for s in one] == [
        (s.token, s.text, s.position, s.finish_reason) for s in other
    ]
    near = [s.logprob for s in one] == pytest.approx([s.logprob for s in other], abs=1e-3)
    return same and near


def leftover(engine: Engine) -> int:
    def count() -> int:
        engine.tree.index.clear()
        return engine.tree.pool.used

    return engine.call(count)


# -- the same text ---------------------------------------------------------------------------

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


@settings(max_examples=60, deadline=None)
@given(options=OPTIONS, guesses=GUESSES, prompt=st.lists(st.integers(0, 11), min_size=1))
def test_no_drafter_changes_the_text(
    letters: Engine, options: dict[str, Any], guesses: list[list[int]], prompt: list[int]
):
    prompt = prompt[: options["context"]]
    plain = list(letters.submit(a_request(prompt, **options)))
    said = iter(guesses)
    drafters = [
        Says(lambda tokens: next(said, [])),
        PromptLookup(shortest=1),
        Adaptive(PromptLookup()),
        CorpusDrafter(Corpus([list(range(12)), [0, 2, 4, 6, 8, 10]])),
    ]
    for drafter in drafters:
        steps = list(letters.submit(a_request(prompt, drafter, **options)))
        assert told(steps) == told(plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_is_always_right_and_seen_in_the_steps(letters: Engine, temperature: float):
    options = {"temperature": temperature, "seed": 3, "max_tokens": 30}
    plain = list(letters.submit(a_request([1, 2], **options)))
    whole = [1, 2, *(step.token for step in plain)]
    runs = letters.steps
    oracle = Says(lambda tokens: whole[len(tokens) : len(tokens) + 4])
    steps = list(letters.submit(a_request([1, 2], oracle, **options)))
    assert told(steps) == told(plain)
    assert letters.steps - runs == 7, "1 for the prompt, then 5 tokens at a time"
    assert Counter(step.draft for step in steps) == {"accepted": 23, None: 7}
    liar = Says(lambda tokens: [(whole[len(tokens)] + 1) % 12])
    steps = list(letters.submit(a_request([1, 2], liar, **options)))
    assert told(steps) == told(plain)
    # Neither the first token (no draft yet) nor the last one (nothing behind it) had a draft.
    assert [step.draft for step in steps] == [None, *["rejected"] * 28, None]
    assert {(p, a) for p, a, _ in liar.told} == {(1, 0)}


def test_every_round_is_told_with_its_time(letters: Engine):
    turn = itertools.count()
    drafter = Says(lambda tokens: [0, 0] if next(turn) % 2 else [])
    steps = list(letters.submit(a_request([1], drafter, max_tokens=12, temperature=0)))
    assert sum(accepted + 1 for _, accepted, _ in drafter.told) >= len(steps) - 3
    assert {proposed for proposed, _, _ in drafter.told} >= {0, 2}
    assert all(seconds > 0 for _, _, seconds in drafter.told)
    assert sum(seconds for _, _, seconds in drafter.told) <= sum(step.seconds for step in steps)


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
    assert told(list(stream)) == told(plain)
    assert len(stream.notes) == 1 and stream.notes[0].startswith("drafting stopped: the drafter")


def test_pages_come_back(letters: Engine):
    for number in range(20):
        stream = letters.submit(a_request([number % 12], garbage(number, 12), seed=number))
        if number % 3 == 0:
            next(stream)
            stream.close()
        else:
            list(stream)
    assert leftover(letters) == 0


@pytest.mark.parametrize("page_count", [17, 20, 40])
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
        assert told(list(stream)) == told(list(plain))
    assert tight.scheduler.preemptions > 0 or page_count == 40
    assert leftover(tight) == 0
    tight.close()


# -- the right distribution ------------------------------------------------------------------

DRAFTERS: dict[str, Callable[[Request], Any]] = {
    "constant": lambda request: Says(lambda tokens: [0, 0, 0]),
    "likeliest": lambda request: Says(lambda tokens: [0, 1]),
    "lookup": lambda request: PromptLookup(shortest=1),
    "garbage": lambda request: garbage(request.limits.sample, 3),
    "adaptive": lambda request: Adaptive(Says(lambda tokens: [0, 1, 2])),
}


def take_every_possible_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake: a drafted token is kept if it is possible at all."""
    accept = WrittenText.accept

    def lenient(self: Any, token: int, logprob: float, pick: Any) -> bool:
        if self.guesses.checked < len(self.guesses.first):
            likely = {c.token for c in pick.candidates if c.probability > 0}
            if self.guesses.first[self.guesses.checked] in likely:
                token = self.guesses.first[self.guesses.checked]
                pick = replace(pick, token=token)
        return accept(self, token, logprob, pick)

    monkeypatch.setattr(WrittenText, "accept", lenient)


def one_draw_for_a_whole_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake: every token of a run is picked by the draw of the run's first."""
    row = WrittenText.row_input
    monkeypatch.setattr(
        WrittenText,
        "row_input",
        lambda self: replace(row(self), position=self.length - self.guesses.checked),
    )


def the_draw_after_a_rejection_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake: a token behind a rejected one is picked by the rejected one's draw."""
    row, before = WrittenText.row_input, {}

    def stale(self: Any) -> Any:
        written = row(self)
        if self.guesses.checked == 0 and before.get(id(self)) == self.length - 1:
            written = replace(written, position=self.length - 1)
        if self.guesses.first:
            before[id(self)] = self.length
        return written

    monkeypatch.setattr(WrittenText, "row_input", stale)


MISTAKES = [
    take_every_possible_draft,
    one_draw_for_a_whole_draft,
    the_draw_after_a_rejection_again,
]


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
    found = Counter(tuple(step.token for step in stream) for stream in streams)
    engine.close()
    off = {}
    for text in itertools.product(range(3), repeat=3):
        whole = (0, 1, *text)
        exact = np.prod([probabilities[whole[n : n + 3]] for n in range(3)]) * 8**3
        if found[text] != round(exact):
            off[str(text)] = found[text] - round(exact)
    return off


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_draw_counted_out(monkeypatch: pytest.MonkeyPatch, name: str):
    assert count_out(monkeypatch, DRAFTERS[name]) == {}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_counting_out_finds_mistakes(monkeypatch: pytest.MonkeyPatch, mistake: Any):
    mistake(monkeypatch)
    assert count_out(monkeypatch, DRAFTERS["likeliest"])


def chi_square() -> float:
    """How well 2,000 pairs of tokens fit their distribution, at vocabulary 16: the p-value."""
    probabilities = table(16, seed=2)
    engine = fake_engine(probabilities, page_count=1 << 14)
    make = lambda request: Says(lambda tokens: [0, 1, 2, 1, 0])  # noqa: E731
    streams = [
        engine.submit(a_request([3, 4], make, seed=seed, max_tokens=4, top=16, **UNCHANGED))
        for seed in range(2000)
    ]
    found = np.zeros((16, 16))
    for stream in streams:
        tokens = [step.token for step in stream]
        found[tokens[1], tokens[2]] += 1  # the first of a draft, and the second or a fresh start
    engine.close()
    first = probabilities[3, 4]
    second = first[:, None] * probabilities[4]  # [first, second]
    pairs = np.einsum("ab,abc->bc", second, probabilities)
    expected = pairs.ravel() * found.sum()
    order = np.argsort(expected)
    few = order[np.cumsum(expected[order]) < 8]  # put together, for chi-square wants a few in each
    rest = np.setdiff1d(order, few)
    observed = np.append(found.ravel()[rest], found.ravel()[few].sum())
    wanted = np.append(expected[rest], expected[few].sum())
    keep = wanted > 0
    assert observed[~keep].sum() == 0
    return float(scipy.stats.chisquare(observed[keep], wanted[keep]).pvalue)


def test_chi_square():
    assert chi_square() > 1e-3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_chi_square_finds_mistakes(monkeypatch: pytest.MonkeyPatch, mistake: Any):
    mistake(monkeypatch)
    try:
        assert chi_square() < 1e-6
    except AssertionError as error:
        assert "observed" in str(error), "found something that is impossible: that is found, too"


# -- the drafters ----------------------------------------------------------------------------


def looked_up(text: list[int], longest: int, shortest: int, most: int) -> list[int]:
    """What `PromptLookup` should say, in the simplest way."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if length < len(text) and text[end - length : end] == text[-length:]:
                grown = list(text)
                for n in range(most):
                    grown.append(grown[end + n])
                return grown[len(text) :]
    return []


EDITS = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=20
)


@settings(max_examples=200, deadline=None)
@given(edits=EDITS, most=st.integers(1, 9))
def test_lookup_finds_the_latest_of_the_longest(edits: Any, most: int):
    drafter, text = PromptLookup(longest=4, shortest=1), [0]
    for back, more in edits:  # also back to the beginning, and on with another text
        text = [*text[: max(0, len(text) - back)], *more]
        assert drafter.propose(text, most) == looked_up(text, 4, 1, most)


@settings(max_examples=200, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=5),
    text=st.lists(st.integers(0, 3), max_size=10),
    most=st.integers(0, 5),
)
def test_a_corpus_gives_what_followed_the_longest_match(documents: Any, text: Any, most: int):
    found = Corpus(documents).following(text, most)
    longest = 0  # that something follows, or that is the longest at all
    for document in documents:
        for end in range(2, len(document) + 1):
            for length in range(2, min(8, end, len(text)) + 1):
                if document[end - length : end] == text[-length:]:
                    longest = max(longest, length)
    if not longest:
        assert found == []
    elif found:
        joined = [*text[-longest:], *found]
        assert any(
            document[n : n + len(joined)] == joined
            for document in documents
            for n in range(len(document))
        )
        assert len(found) <= most
    else:  # nothing followed where it stood
        assert most == 0 or all(
            document[n : n + longest] != text[-longest:]
            for document in documents
            for n in range(len(document) - longest)
        )


def test_a_corpus_asks_the_majority(tmp_path: Path):
    corpus = Corpus([[1, 2, 7, 7], [1, 2, 5, 6], [1, 2, 5, 8], [4, 1, 2, 9]])
    assert corpus.following([3, 1, 2], 2) == [5, 8]
    assert corpus.following([4, 1, 2], 9) == [9]
    assert corpus.following([2], 9) == []
    np.save(tmp_path / "ids.npy", np.array([5, 6, 7, 8, 9]))
    make = drafter_from(f"corpus:{tmp_path}/ids.npy:2", SimpleNamespace())  # type: ignore[arg-type]
    assert isinstance(drafter := make(a_request([1])), Adaptive)
    assert drafter.drafter.propose([1, 6, 7], 9) == [8, 9]
    with pytest.raises(SettingsError, match="no such file"):
        drafter_from("corpus:nowhere.txt", SimpleNamespace(tokenizer=None))  # type: ignore[arg-type]


# -- whether it pays -------------------------------------------------------------------------


def rounds(drafter: Adaptive, right: Callable[[int], int], cost: Callable[[int], float], n: int):
    """Play rounds: `right` of a draft's tokens are right, and a run of so many costs so much."""
    notes, lengths = [], []
    for _ in range(n):
        draft = drafter.propose([1, 2, 3], 100)
        lengths.append(len(draft))
        note = drafter.learn(len(draft), right(len(draft)), cost(len(draft)))
        notes += [note] if note else []
    return notes, lengths


def test_drafts_grow_while_they_are_right():
    drafter = Adaptive(Says(lambda tokens: [7] * 50), longest=16)
    notes, lengths = rounds(drafter, lambda k: k, lambda k: 1 + k / 8, 12)
    assert lengths == [0, 0, 4, 8, *[16] * 8] and notes == []
    assert drafter.gain is not None and drafter.gain > 4
    _, lengths = rounds(drafter, lambda k: min(k, 1), lambda k: 1 + k / 20, 5)
    assert lengths == [16, 8, 4, 2, 2]


def test_it_stops_when_nothing_is_right_and_tries_again():
    drafter = Adaptive(Says(lambda tokens: [7] * 50))
    notes, lengths = rounds(drafter, lambda k: 0, lambda k: 1 + k / 2, 400)
    assert lengths[:7] == [0, 0, 4, 2, 1, 1, 0]
    assert "accepted 0 of 8 tokens" in notes[0] and "times an ordinary one" in notes[0]
    assert f"after {FIRST_REST} tokens" in notes[0] and f"after {2 * FIRST_REST}" in notes[1]
    assert lengths[6 : 6 + FIRST_REST] == [0] * FIRST_REST and lengths[6 + FIRST_REST] > 0
    assert sum(map(bool, lengths)) == HOPELESS * len(notes) <= 20
    # The tide turns: it is noticed, and the failures are forgotten.
    _, lengths = rounds(drafter, lambda k: k, lambda k: 1.1, 700)
    assert lengths[-1] == 16


def test_it_stops_when_right_drafts_cost_too_much():
    drafter = Adaptive(Says(lambda tokens: [7] * 4))
    notes, _ = rounds(drafter, lambda k: k // 2, lambda k: 1.0 if k == 0 else 4.5, 30)
    assert len(notes) == 1 and "4.5 times" in notes[0]
    dear = Adaptive(Says(lambda tokens: [7] * 4))
    _, lengths = rounds(dear, lambda k: k, lambda k: 1.0 if k == 0 else 17.0, 30)
    assert sum(map(bool, lengths)) == 2, "a machine on which runs of many tokens are a disaster"
    cheap = Adaptive(Says(lambda tokens: [7] * 4))
    assert rounds(cheap, lambda k: k // 2, lambda k: 1.0 if k == 0 else 1.2, 90)[0] == []


def test_stopping_is_said_in_the_notes(letters: Engine):
    plain = list(letters.submit(a_request([1, 2], seed=1, max_tokens=60)))
    whole = [1, 2, *(step.token for step in plain)]
    make = lambda request: Adaptive(  # noqa: E731
        Says(lambda tokens: [(whole[len(tokens)] + 1) % 12] * 3)
    )
    request = a_request([1, 2], make, seed=1, max_tokens=60)
    generation = Generation(request)
    assert told(list(generation.extend(letters.submit(request)))) == told(plain)
    assert any(note.startswith("drafting stopped: accepted 0 of") for note in generation.notes)
    assert Counter(step.draft for step in generation.steps)["rejected"] <= 3 * HOPELESS


# -- on models -------------------------------------------------------------------------------


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
    "corpus": lambda lm: lambda request: CorpusDrafter(Corpus([list(range(250))])),
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", MAKERS)
def test_a_tiny_model_writes_the_same(tiny_lm: Any, name: str, temperature: float):
    prompt = [5, 6, 7, 8, 5, 6, 7]
    make = MAKERS[name](tiny_lm)
    for seed in range(2):
        options = {"temperature": temperature, "seed": seed, "max_tokens": 50, "sample": seed}
        plain = generate(tiny_lm, prompt, None, **options)
        drafted = generate(tiny_lm, prompt, make, **options)
        assert alike(drafted.steps, plain.steps)
        if name == "model":  # the same model with the same draws can only agree
            assert "rejected" not in {step.draft for step in drafted.steps}
            assert Counter(step.draft for step in drafted.steps)["accepted"] == 40
        back = drafted.rewind(20).resume()
        assert alike(back.steps, plain.steps)
        other = drafted.rewind(10).choose(9).resume(max_tokens=30)
        assert alike(other.steps, plain.rewind(10).choose(9).resume(max_tokens=30).steps)
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
        made = generate(tiny_lm, prompt, maker(tiny_lm), temperature=0, max_tokens=500)
        assert made.finish_reason == "context" and len(made.tokens) == 8


def test_words(tiny_lm: Any):
    made = make_drafter("lookup", tiny_lm)
    assert callable(made) and make_drafter("lookup", tiny_lm) is made, "got ready once"
    one, other = made(a_request([1])), made(a_request([1]))
    assert one is not other, "a drafter serves one text"
    own = PromptLookup()
    assert make_drafter(own, tiny_lm) is own and make_drafter(None, tiny_lm) is None
    loaded = []
    make = drafter_from("model:some/where:3", tiny_lm, lambda path: loaded.append(path) or tiny_lm)
    assert loaded == ["some/where"]
    drafter = make(a_request([1, 2]))
    assert isinstance(drafter, Adaptive) and drafter.longest == 3
    for wrong in ("", "lookup:x", "lookup:0", "luck", "model:", "corpus", "model:x"):
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


REAL = (
    'Text: "The ferry to the island leaves at seven in the morning from the old harbour."\n'
    'The text once more: "'
)


@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_default_model_writes_the_same(lm: Any, temperature: float):
    ids = lm.tokenizer.encode(REAL)
    options = {"temperature": temperature, "seed": 2, "max_tokens": 32}
    plain = generate(lm, ids, None, **options)
    for name in ("lookup", "adaptive", "corpus"):
        drafted = generate(lm, ids, MAKERS[name](lm), **options)
        assert alike(drafted.steps, plain.steps)
    known = Corpus([[*ids, *plain.tokens]])  # it foresees every word
    drafted = generate(lm, ids, lambda request: CorpusDrafter(known), **options)
    assert alike(drafted.steps, plain.steps)
    assert Counter(step.draft for step in drafted.steps)["accepted"] >= 5


@pytest.mark.real
def test_the_default_model_drafts_for_itself(lm: Any):
    ids = lm.tokenizer.encode("The sky is")
    check_same_vocabulary(lm, lm)
    plain = generate(lm, ids, None, temperature=0.9, seed=4, max_tokens=13)
    make = lambda request: ModelDrafter(lm, request, most=3)  # noqa: E731
    drafted = generate(lm, ids, make, temperature=0.9, seed=4, max_tokens=13)
    assert alike(drafted.steps, plain.steps)
    assert [s.draft for s in drafted.steps] == [None, *(["accepted"] * 3 + [None]) * 3]
