"""Arbitrary use of the engine on a model with recurrent states: every text as if it were alone, no
slot lost or mixed up, and not more computed again than the policy says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from helpers.null_model import logits_after
from helpers.recurrent_null import RecurrentNull, spread
from unspool.backends.step import StepLimits
from unspool.engine.engine import Engine
from unspool.engine.request import DraftTree, Limits, Request
from unspool.engine.states import DENSE
from unspool.engine.tree import Branch
from unspool.sampling import SamplingSettings

END = 1
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # few kinds: prefixes often meet


def max_recomputed(num_rewound: int, page_size: int) -> int:
    """Return the most tokens that rewinding by `num_rewound` computes again, if no state of the
    text was evicted."""
    pages, gap = -(-num_rewound // page_size) + 1, 1
    while (DENSE - 1) * gap < pages:
        gap *= 2
    return (gap + 1) * page_size


class Guesses:
    """A drafter that is sometimes right: it knows what comes next, and errs in places."""

    def __init__(self, next_token: Callable[[list[int]], int], tree: bool, errs: int) -> None:
        self.next_token, self.tree, self.errs, self.rounds = next_token, tree, errs, 0

    def propose(self, tokens: Any, most: int) -> list[int] | DraftTree:
        self.rounds += 1
        text = list(tokens)
        for _ in range(min(4, most)):
            text.append(self.next_token(text))
        guess = text[len(tokens) :]
        if guess and self.rounds % self.errs == 0:
            guess[self.rounds % len(guess)] = 3
        if not self.tree:
            return guess
        side = spread(list(tokens), 2)
        if self.rounds % 2:  # the second run has the right value
            return DraftTree([*side, *guess], [-1, 0, -1, *range(2, 1 + len(guess))])
        return DraftTree([*guess, *side], [*range(-1, len(guess) - 1), -1, len(guess)])

    def learn(self, proposed: int, accepted: int, seconds: float) -> None:
        return None


def request(prompt: list[int], count: int, drafter: Any = None, **options: Any) -> Request:
    return Request(
        prompt=tuple(prompt),
        settings=SamplingSettings(temperature=0),
        limits=Limits(max_tokens=count, context=512, end_ids=frozenset({END})),
        drafter=drafter,
        **options,
    )


class StatesMachine(RuleBasedStateMachine):
    """Open, append, fork, rewind, look, write with drafts, cancel, evict, in any order, alone and
    in batches, with enough slots or hardly any."""

    branches = Bundle("branches")

    @initialize(
        slots=st.sampled_from([2, 3, 5, 9, 200]),
        pages=st.sampled_from([40, 400]),
        cheap=st.booleans(),
        overlaps=st.booleans(),
    )
    def begin(self, slots: int, pages: int, cheap: bool, overlaps: bool) -> None:
        self.backend = self.make(slots, pages, cheap, overlaps)
        self.engine = Engine(self.backend, lambda token: b"x")
        self.texts: dict[Branch, list[int]] = {}
        self.longest = 0
        self.roomy = slots == 200 and pages == 400

    # -- of which backend, and what it should say ----------------------------------------------

    def make(self, slots: int, pages: int, cheap: bool, overlaps: bool) -> Any:
        return RecurrentNull(
            slots,
            2 if cheap else 1000,
            pages=pages,
            overlaps=overlaps,
            limits=StepLimits(8, 24, 8),
        )

    def expected(self, tokens: list[int]) -> Any:
        """The logits of a fresh run."""
        return logits_after(tokens, self.backend.vocab_size)

    def read(self) -> int:
        """How many tokens were computed so far."""
        return sum(map(sum, self.backend.runs))

    error = 0.0  # that is allowed

    def check(self, branch: Branch, logits: Any) -> None:
        self.compare(np.asarray(logits)[-1], self.texts[branch])

    def compare(self, logits: Any, tokens: list[int]) -> None:
        assert np.abs(logits - self.expected(tokens)).max() <= self.error

    def next_token(self, tokens: list[int]) -> int:
        return int(np.argmax(self.expected(tokens)))

    def check_written(self, prompt: list[int], written: list[int]) -> None:
        """Each token is the likeliest behind those before it."""
        for place, token in enumerate(written):
            logits = self.expected([*prompt, *written[:place]])
            assert logits[token] >= logits.max() - 2 * self.error
        assert END not in written[:-1]

    # -- what is done with it --------------------------------------------------------------------

    @rule(target=branches, tokens=TOKENS)
    def open_branch(self, tokens: list[int]) -> Any:
        if len(self.texts) >= 5:
            return multiple()
        branch = self.engine.open(tokens)
        self.texts[branch] = list(tokens)
        self.check(branch, self.engine.extend(branch))
        return branch

    @rule(branch=branches, tokens=TOKENS, num_logits=st.integers(1, 6))
    def append(self, branch: Branch, tokens: list[int], num_logits: int) -> None:
        if branch.length + len(tokens) > 110:
            return
        self.texts[branch] += tokens
        text = self.texts[branch]
        num_logits = min(num_logits, len(text))
        logits = np.asarray(self.engine.extend(branch, tokens, num_logits=num_logits))
        for row in range(num_logits):
            self.compare(logits[row], text[: len(text) - num_logits + row + 1])

    @rule(branch=branches, others=st.lists(branches, max_size=3), tokens=TOKENS)
    def append_together(self, branch: Branch, others: list[Branch], tokens: list[int]) -> None:
        selected = [b for b in dict.fromkeys([branch, *others]) if b.length < 96]
        for member in selected:
            self.texts[member] += tokens
        if selected:
            results = self.engine.extend_all([(member, tokens) for member in selected])
            for member, logits in zip(selected, results, strict=True):
                self.check(member, logits)

    @rule(target=branches, branch=branches)
    def fork(self, branch: Branch) -> Any:
        if len(self.texts) >= 5:
            return multiple()
        other = branch.fork()
        self.texts[other] = list(self.texts[branch])
        return other

    @rule(branch=branches, part=st.floats(0, 1), token=st.integers(0, 2))
    def rewind(self, branch: Branch, part: float, token: int) -> None:
        length = int(branch.length * part)
        self.longest = max(self.longest, *map(len, self.texts.values()))
        branch.rewind(length)
        del self.texts[branch][length:]
        before, forgotten = self.read(), self.engine.tree.states.num_evicted  # type: ignore[union-attr]
        self.texts[branch].append(token)
        self.check(branch, self.engine.extend(branch, [token]))
        again = self.read() - before - 1
        states = self.engine.tree.states
        assert states is not None
        if self.roomy and forgotten == 0:
            most = max_recomputed(self.longest - length, self.backend.page_size)
            assert again <= most, "a text is not read again from further back than is promised"

    @rule(branch=branches, part=st.floats(0, 0.99))
    def look(self, branch: Branch, part: float) -> None:
        position = int(branch.length * part)
        observed = self.engine.look(branch, at=frozenset({position}), deep=False)
        self.check(branch, observed.logits)
        assert [inside.first_position for inside in observed.inside] == [position]

    @rule(
        prompts=st.lists(TOKENS, min_size=1, max_size=4),
        tree=st.booleans(),
        errs=st.integers(1, 3),
        count=st.integers(1, 12),
        cached=st.booleans(),
    )
    def write(
        self, prompts: list[list[int]], tree: bool, errs: int, count: int, cached: bool
    ) -> None:
        drafters = [Guesses(self.next_token, tree, errs) if n % 2 else None for n in range(4)]
        streams = [
            self.engine.submit(request(prompt, count, drafter, cached=cached))
            for prompt, drafter in zip(prompts, drafters, strict=False)
        ]
        for prompt, stream in zip(prompts, streams, strict=True):
            written = [step.token for step in stream]
            self.check_written(prompt, written)
            assert len(written) == count or written[-1] == END
            self.longest = max(self.longest, len(prompt) + count + 4)

    @rule(prompt=TOKENS, num_steps=st.integers(0, 5), drafts=st.booleans())
    def cancel(self, prompt: list[int], num_steps: int, drafts: bool) -> None:
        drafter = Guesses(self.next_token, True, 2) if drafts else None
        stream = self.engine.submit(request(prompt, 40, drafter))
        observed = [step.token for step, _ in zip(stream, range(num_steps), strict=False)]
        stream.close()
        self.check_written(prompt, observed)
        text = list(prompt)
        for _ in range(num_steps + 1):  # about as far as it was computed
            text.append(self.next_token(text))
        other = self.engine.open([*text, 2, 2])
        self.texts[other] = [*text, 2, 2]
        self.check(other, self.engine.extend(other))
        del self.texts[other]
        other.release()
        self.longest = max(self.longest, len(prompt) + 44)

    @rule(branch=consumes(branches))
    def release(self, branch: Branch) -> None:
        del self.texts[branch]
        branch.release()

    @rule()
    def evict(self) -> None:
        self.engine.call(self.engine.tree.index.clear)

    @invariant()
    def branches_stand_at_states(self) -> None:
        if not hasattr(self, "engine"):
            return

        def check() -> None:
            for branch in self.texts:
                assert branch.state is not None and not branch.state.running
                tip = branch.state.tip
                assert branch.num_computed == (0 if tip is None else tip.length)
                states = branch.state.kept_states
                assert not states or max(states) <= branch.num_computed
            assert self.engine.tree.states is not None and self.engine.tree.states.num_running == 0

        self.engine.call(check)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for branch in self.texts:
                branch.release()
            self.engine.call(self.engine.tree.index.clear)
            states = self.engine.tree.states
            assert states is not None and states.used == 0, "no slot is lost"
            assert self.engine.tree.pool.used == 0
            self.engine.close()
