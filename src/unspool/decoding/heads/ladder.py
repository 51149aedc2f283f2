"""How much a head drafts: what each size of draft gains and costs is measured, and the best taken.

Sizes are rungs of a ladder: chains of ever less likely guesses, then trees, the last of 31 tokens.
A text climbs as long as the next rung gives more tokens a second, and comes down when not. Below
the lowest rung is writing without drafts: where that is quickest, drafting rests, and each time it
fails again it rests twice as long. What rounds cost is a matter of the machine, so all texts of a
model share it, and a new text begins on the rung that was best for the last one.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

from unspool.decoding.heads.growing import Shape

SHAPES = (
    Shape(5, sure=0.8), Shape(5, sure=0.6), Shape(5, sure=0.4), Shape(7, sure=0.25),
    Shape(7, sure=0.12), Shape(15, width=4, depth=6), Shape(31, width=8, depth=7),
)  # fmt: skip
FIRST_RUNG = 0  # what is lost least on, should it not pay
ORDINARY_FIRST = 2  # rounds without a draft before the first one
ORDINARY_EVERY = 48  # drafted rounds after which one without is measured anew
FEWEST = 6  # rounds on a rung before it is judged
HELD_UP = 3  # times the usual: what a round is taken for at the most
STALE = 64  # drafted rounds after which a neighbouring rung is tried again
PAYS = 1.03  # times the speed without drafts: less may be chance
NEARLY = 0.92  # of the speed without drafts: from there on the next rung is worth a try
FIRST_REST, LONGEST_REST = 128, 4096
WAKING = 16  # rounds before the end of a rest from which on the text is read again


class Costs:
    """Seconds of a round on each rung (-1: without a draft), and the tokens it gave, lately.

    `watching_is_free`: whether a run costs no more when somebody looks at its vectors. Where it
    does, writing without drafts is measured without looking.
    """

    def __init__(self, *, watching_is_free: bool = True) -> None:
        self.watching_is_free = watching_is_free
        self.rung = FIRST_RUNG
        self.rest = FIRST_REST
        self.resting = 0
        self._seconds: dict[int, deque[float]] = {}
        self._tokens: dict[int, deque[int]] = {}

    def add(self, rung: int, tokens: int, seconds: float) -> None:
        self._seconds.setdefault(rung, deque(maxlen=24)).append(seconds)
        self._tokens.setdefault(rung, deque(maxlen=24)).append(tokens)

    def count(self, rung: int) -> int:
        return len(self._tokens.get(rung, ()))

    def seconds(self, rung: int) -> float:
        """On average: rounds of one rung differ in length. One that was held up does not count for
        more than a few others."""
        most = HELD_UP * median(self._seconds[rung])
        return fmean(min(each, most) for each in self._seconds[rung])

    def rate(self, rung: int) -> float:
        """Tokens a second."""
        return fmean(self._tokens[rung]) / max(self.seconds(rung), 1e-9)


class Ladder:
    """The size of the next draft, for one text."""

    def __init__(self, costs: Costs | None = None, most: int = SHAPES[-1].nodes) -> None:
        self.costs = costs or Costs()
        self.most = most  # tokens of a draft
        fits = [n for n, shape in enumerate(SHAPES) if shape.width == 1 or shape.nodes <= most]
        self.top = max(fits)
        self.rung = min(self.costs.rung, self.top)
        self.resting = self.costs.resting
        self._current: int | None = None  # the rung of the round that runs; -1: without a draft
        self._rounds = 0  # drafted ones
        self._on_rung = 0
        self._since_ordinary = 0
        self._tried: dict[int, int] = {}  # when each rung was last on, in drafted rounds

    @property
    def reading(self) -> bool:
        """Whether what is written now is to be looked at."""
        measuring = self._current == -1 and not self.resting
        return self.resting <= WAKING and (self.costs.watching_is_free or not measuring)

    def choose(self) -> Shape | None:
        """The shape of the next draft; None: write without one."""
        costs = self.costs
        must_measure = costs.count(-1) < ORDINARY_FIRST or self._since_ordinary >= ORDINARY_EVERY
        self._current = -1 if self.resting or must_measure else self.rung
        if self._current < 0:
            return None
        shape = SHAPES[self._current]
        return shape.within(self.most) if shape.width == 1 else shape

    def skip(self) -> None:
        """The round that was chosen for runs without a draft, for want of what it needs."""
        self._current = None

    def learn(self, accepted: int, seconds: float) -> str | None:
        """How the round went; a note if drafting stops."""
        looked_on = self.reading
        rung, self._current = self._current, None
        if rung is None:
            return None
        if self.resting:
            self.resting -= 1
            self.costs.resting = self.resting
        if rung >= 0 or self.costs.watching_is_free or not looked_on:
            self.costs.add(rung, accepted + 1, seconds)
        if rung < 0:
            self._since_ordinary = 0
            return None
        self._rounds += 1
        self._on_rung += 1
        self._since_ordinary += 1
        self._tried[rung] = self._rounds
        return self._move() if self._on_rung >= FEWEST else None

    def _move(self) -> str | None:
        """To a better rung, to one beside this that is to be tried, or off the ladder."""
        costs, here = self.costs, self.rung
        beside = [rung for rung in (here - 1, here + 1) if 0 <= rung <= self.top]
        every = range(self.top + 1)
        known = {rung: costs.rate(rung) for rung in every if costs.count(rung) >= FEWEST}
        best = max(known, key=lambda rung: known[rung])
        plain = costs.rate(-1) if costs.count(-1) else 0.0
        untried = [
            rung for rung in beside
            if rung not in known or self._rounds - self._tried.get(rung, -STALE) >= STALE
        ]  # fmt: skip
        # Upwards only from where drafts pay, or nearly; downwards only from where they do not.
        pays, nearly = known[best] > PAYS * plain, known[best] > NEARLY * plain
        untried = [rung for rung in untried if (nearly if rung > here else not pays)]
        if best != here or untried:
            self.rung, self._on_rung = best if best != here else untried[0], 0
            return None
        if pays:
            costs.rung, costs.rest = here, FIRST_REST
            return None
        return self._stop(known[best] / plain)

    def _stop(self, gain: float) -> str:
        costs = self.costs
        note = (
            f"drafting stopped: with drafts of up to {SHAPES[self.rung].nodes} the text came at "
            f"{gain:.2f} times the speed without; trying again after {costs.rest} tokens"
        )
        self.resting = costs.resting = costs.rest
        costs.rest = min(2 * costs.rest, LONGEST_REST)
        costs.rung = self.rung = 0
        self._on_rung = 0
        return note


class Fixed:
    """Always the same shape: for measuring what it is worth."""

    reading = True

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def choose(self) -> Shape | None:
        return self.shape

    def skip(self) -> None:
        pass

    def learn(self, accepted: int, seconds: float) -> str | None:
        return None
