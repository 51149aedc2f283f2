"""How much to draft, and whether at all: judged by what was measured in this very text.

A drafted run reads several tokens and costs more than an ordinary one; it pays when the tokens
that proved right outweigh that. `Adaptive` wraps a drafter and watches both sides: rounds with a
draft and rounds without. The draft grows while all of it proves right, and shrinks by half when
not. When drafting does not pay it stops, says so with the numbers, and tries again later; each
time it fails again it waits twice as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from time import perf_counter

from unspool.engine.request import Drafter, DraftTree

FIRST_LENGTH = 4  # of a draft, before anything is known
LONGEST = 16
ORDINARY_FIRST = 2  # rounds without a draft before the first one: what an ordinary run costs
ORDINARY_EVERY = 32  # drafted rounds after which an ordinary one is measured anew
REMEMBERED = 12  # rounds that the judgement looks back on
FEWEST = 6  # drafted rounds before drafting may be judged by its cost
HOPELESS = 4  # drafted rounds without a single right token after which no cost matters
TOO_DEAR = 2  # drafted rounds that took longer than writing all of the draft one by one
FIRST_REST = 32  # rounds without drafts after drafting did not pay
LONGEST_REST = 1024


class Adaptive:
    """A drafter that adapts its length, and stops while it does not pay."""

    def __init__(self, drafter: Drafter, *, longest: int = LONGEST) -> None:
        self.drafter = drafter
        self.longest = longest
        self.length = min(FIRST_LENGTH, longest)
        self.resting = 0  # rounds left before drafting is tried again
        self._rest = FIRST_REST
        self._asking = 0.0  # seconds that the drafter itself took in this round
        self._ordinary: deque[float] = deque(maxlen=5)
        self._drafted: deque[tuple[int, int, float]] = deque(maxlen=REMEMBERED)
        self._since_ordinary = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int] | DraftTree:
        self._asking = 0.0
        if self.resting or self._must_measure():
            return []
        began = perf_counter()
        draft = self.drafter.propose(tokens, min(most, self.length))
        self._asking = perf_counter() - began
        return draft if isinstance(draft, DraftTree) else draft[: self.length]

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        self.resting = max(0, self.resting - 1)
        if not proposed:  # what the drafter took to find nothing is no part of an ordinary run
            self._ordinary.append(seconds - self._asking)
            self._since_ordinary = 0
            return None
        self._since_ordinary += 1
        self._drafted.append((proposed, accepted, seconds))
        note = self.drafter.learn(proposed, accepted, seconds)
        if accepted == proposed:
            if proposed >= self.length:
                self.length = min(self.longest, 2 * self.length)
        else:
            # Not all the way down: the first tokens of a draft are what makes a run dear, and where
            # a text copies, a short draft would take many runs to grow again.
            self.length = max(self.length // 2, min(self.length, accepted + 1), 1)
        return note if self._pays() else self._stop()

    @property
    def gain(self) -> float | None:
        """Tokens a second with drafts, by those without; None while it is not known."""
        if not self._drafted or not self._ordinary:
            return None
        tokens = fmean(accepted + 1 for _, accepted, _ in self._drafted)
        return tokens / max(self.cost, 1e-9)

    @property
    def cost(self) -> float:
        """How many ordinary runs a drafted one takes; medians, for others use the machine too."""
        ordinary = median(self._ordinary) if self._ordinary else 0.0
        return median(s for _, _, s in self._drafted) / ordinary if ordinary > 0 else 1.0

    def _must_measure(self) -> bool:
        return len(self._ordinary) < ORDINARY_FIRST or self._since_ordinary >= ORDINARY_EVERY

    def _pays(self) -> bool:
        rounds = len(self._drafted)
        if rounds >= HOPELESS and not any(accepted for _, accepted, _ in self._drafted):
            return False
        if rounds >= TOO_DEAR and self._ordinary:
            ordinary = median(self._ordinary)
            if all(took > (count + 1) * ordinary for count, _, took in self._drafted):
                return False  # it would not pay if all of it were right
        if rounds < FEWEST or self.gain is None:
            return True
        if self.gain > 1.0:
            if rounds == REMEMBERED:
                self._rest = FIRST_REST  # it paid for a while: an earlier failure is forgotten
            return True
        return False

    def _stop(self) -> str:
        proposed = sum(count for count, _, _ in self._drafted)
        accepted = sum(count for _, count, _ in self._drafted)
        note = (
            f"drafting stopped: accepted {accepted} of {proposed} tokens, "
            f"a drafted run took {self.cost:.1f} times an ordinary one; "
            f"trying again after {self._rest} tokens"
        )
        self.resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        self._drafted.clear()
        self._since_ordinary = 0
        self.length = min(2, self.longest)
        return note
