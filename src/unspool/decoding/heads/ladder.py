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
# Rounds without a draft in a row, before the first draft and then from time to time. The first of
# them does not count: it still feels what came before it.
ORDINARY_FIRST, ORDINARY_AGAIN = 8, 3
ORDINARY_EVERY = 64  # drafted rounds from one time to the next
QUICK = 0.8e-3  # seconds of a round without a draft: to make and hand over a draft takes as long
FEWEST = 6  # rounds on a rung before it is judged ...
HOPELESS, SOON = 2.0, 3  # ... or so few, where the smallest drafts take as long as two without
HELD_UP = 3  # times the usual: a round that took longer waited for something else
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
        """Of a round without a draft, which are all alike, the usual; drafts differ in length, so
        of theirs it is the mean. Those that were held up do not count."""
        usual = median(self._seconds[rung])
        if rung < 0:
            return usual
        return fmean(each for each in self._seconds[rung] if each <= HELD_UP * usual)

    @property
    def is_quick(self) -> bool:
        """Whether writing without drafts is quicker than making one."""
        return self.count(-1) > 0 and self.seconds(-1) < QUICK

    @property
    def is_hopeless(self) -> bool:
        """Whether the smallest drafts take so long that no head can make up for it. How many tokens
        they bring is chance for a while; what they take is known soon."""
        return self.count(-1) > 0 and self.seconds(0) > HOPELESS * self.seconds(-1)

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
        self.resting = self.costs.resting or int(self.costs.is_quick)
        self._current: int | None = None  # the rung of the round that runs; -1: without a draft
        self._rounds = 0  # drafted ones
        self._on_rung = 0
        self._since_ordinary = 0
        self._ordinary = 0  # rounds without a draft that are still to come before the next one
        self._settled = False  # whether one of them is over
        self._tried: dict[int, int] = {}  # when each rung was last on, in drafted rounds

    @property
    def reading(self) -> bool:
        """Whether what is written now is to be looked at."""
        measuring = self._current == -1 and not self.resting
        return self.resting <= WAKING and (self.costs.watching_is_free or not measuring)

    def choose(self) -> Shape | None:
        """The shape of the next draft; None: write without one."""
        first = self.costs.count(-1) < ORDINARY_FIRST - 1
        if not self._ordinary and (first or self._since_ordinary >= ORDINARY_EVERY):
            self._ordinary, self._settled = ORDINARY_FIRST if first else ORDINARY_AGAIN, False
        self._current = -1 if self.resting or self._ordinary else self.rung
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
        if rung < 0:
            return self._learn_ordinary(seconds, looked_on)
        self.costs.add(rung, accepted + 1, seconds)
        self._rounds += 1
        self._on_rung += 1
        self._since_ordinary += 1
        self._tried[rung] = self._rounds
        if self._on_rung == SOON and rung == 0 and self.costs.is_hopeless:
            return self._stop(self.costs.rate(0) / self.costs.rate(-1))
        return self._move() if self._on_rung >= FEWEST else None

    def _learn_ordinary(self, seconds: float, looked_on: bool) -> str | None:
        if self._settled and (self.costs.watching_is_free or not looked_on):
            self.costs.add(-1, 1, seconds)
        self._settled, self._since_ordinary = True, 0
        if self.resting:
            self.resting -= 1
            self.costs.resting = self.resting
            self._ordinary = 0 if self.resting else ORDINARY_AGAIN
            return None
        self._ordinary -= 1
        if self._ordinary or not self.costs.is_quick:
            return None
        return self._rest(
            f"drafting rests: a token takes {1000 * self.costs.seconds(-1):.2f} ms without a "
            "draft, which is about what making one takes"
        )

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
        return self._rest(
            f"drafting stopped: with drafts of up to {SHAPES[self.rung].nodes} the text came at "
            f"{gain:.2f} times the speed without; trying again after {self.costs.rest} tokens"
        )

    def _rest(self, note: str) -> str:
        costs = self.costs
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
