"""Draft-length control: how large the next draft is, and when drafting pauses.

A drafted round verifies several tokens and costs more than a round without a draft. It pays if the
accepted tokens outweigh that. Both controllers measure rounds with and without drafts (the
baseline), pause when drafting is slower, and double the pause each time it fails again:

- `AdaptiveDrafter` wraps any drafter of chains: the length doubles while whole drafts are accepted,
  and shrinks otherwise. Suits prompt lookup, where acceptance comes in bursts.
- `ShapeController` is for drafting heads: it climbs a ladder of draft shapes (chains, then trees)
  to the one with the most tokens per second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter
from typing import NamedTuple

from unspool.engine.request import Drafter, DraftTree, RecordingDrafter


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Size of a draft; with `width` 1 a chain, else a tree."""

    nodes: int  # total
    width: int = 1  # nodes expanded per level
    depth: int = 0  # number of levels; 0: as many as nodes
    min_probability: float = 0.0  # a chain ends where its joint probability falls below this

    @property
    def levels(self) -> int:
        return self.depth or self.nodes

    def within(self, levels: int) -> DraftShape:
        """The same shape with at most `levels` levels."""
        if self.width == 1:
            return DraftShape(min(self.nodes, levels), min_probability=self.min_probability)
        return DraftShape(self.nodes, self.width, min(self.levels, levels))


LONGEST = 16  # tokens of a draft without a head
BASELINE = -1  # the "size" of a round without a draft


class Round(NamedTuple):
    """One measured round."""

    drafted: int  # tokens
    tokens: int  # output tokens
    seconds: float


class RoundCosts:
    """Recent rounds by draft size, and the state of the pause.

    Costs depend on the machine, so all texts that use one head share an instance; a new text starts
    with the size that was best for the last one. `observing_is_free`: whether returning hidden
    states costs nothing; if not, the baseline is measured without them.
    """

    def __init__(
        self,
        *,
        window: int = 24,
        baseline_window: int = 24,
        first_pause: int = 128,
        observing_is_free: bool = True,
    ) -> None:
        self.observing_is_free = observing_is_free
        self.size = 0  # best size of the last text
        self.pause_length = first_pause  # rounds of the next pause
        self.paused = 0  # rounds left in the current pause
        self._window = window
        self._rounds = {BASELINE: deque[Round](maxlen=baseline_window)}

    def add(self, size: int, drafted: int, tokens: int, seconds: float) -> None:
        rounds = self._rounds.setdefault(size, deque(maxlen=self._window))
        rounds.append(Round(drafted, tokens, seconds))

    def rounds(self, size: int) -> Sequence[Round]:
        return self._rounds.get(size, ())

    def count(self, size: int) -> int:
        return len(self.rounds(size))

    def clear(self, size: int) -> None:
        self._rounds.pop(size, None)

    def median_s(self, size: int) -> float:
        return median(entry.seconds for entry in self._rounds[size])

    def seconds(self, size: int) -> float:
        """Median of the baseline; mean of drafted rounds, which vary in length, without
        outliers."""
        usual = self.median_s(size)
        if size == BASELINE:
            return usual
        times = [entry.seconds for entry in self._rounds[size]]
        return fmean(s for s in times if s <= OUTLIER * usual)

    def tokens_per_s(self, size: int) -> float:
        return fmean(e.tokens for e in self._rounds[size]) / max(self.seconds(size), 1e-9)


@dataclass(frozen=True, slots=True)
class Pace:
    """When the baseline is measured, and how long drafting pauses; all in rounds."""

    first_baseline: int  # before the first draft
    baseline: int  # each later time
    baseline_every: int  # drafted rounds between two measurements
    baseline_after_pause: int
    skip_first: bool  # ignore the first round of a measurement: it still feels the one before
    first_pause: int
    max_pause: int


class DraftController:
    """Baseline rounds and pauses of one text."""

    def __init__(self, costs: RoundCosts, pace: Pace) -> None:
        self.costs, self.pace = costs, pace
        self.paused = costs.paused  # rounds left before drafting is tried again
        self._baseline_left = 0
        self._since_baseline = 0  # drafted rounds
        self._is_warm = False  # a round without a draft is over

    def _wants_draft(self) -> bool:
        pace = self.pace
        first = self.costs.count(BASELINE) < pace.first_baseline - pace.skip_first
        if not self._baseline_left and (first or self._since_baseline >= pace.baseline_every):
            self._baseline_left = pace.first_baseline if first else pace.baseline
            self._is_warm = False
        return not (self.paused or self._baseline_left)

    def _learn_baseline(self, seconds: float, *, counts: bool = True) -> None:
        """Record a round without a draft."""
        if counts and (self._is_warm or not self.pace.skip_first):
            self.costs.add(BASELINE, 0, 1, seconds)
        self._is_warm, self._since_baseline = True, 0
        if self.paused:
            self.paused -= 1
            self.costs.paused = self.paused
            self._baseline_left = 0 if self.paused else self.pace.baseline_after_pause
        else:
            self._baseline_left = max(0, self._baseline_left - 1)

    def _pause(self, note: str) -> str:
        costs = self.costs
        self.paused = costs.paused = costs.pause_length
        costs.pause_length = min(2 * costs.pause_length, self.pace.max_pause)
        return note


LENGTH_PACE = Pace(
    first_baseline=2, baseline=1, baseline_every=32, baseline_after_pause=0, skip_first=False,
    first_pause=32, max_pause=1024,
)  # fmt: skip
FIRST_LENGTH = 4  # tokens of the first draft
WINDOW = 12  # rounds that the decision looks back on
MIN_ROUNDS = 6  # drafted rounds before drafting is judged by its speed
HOPELESS_ROUNDS = 4  # rounds without any accepted token after which drafting pauses
TOO_SLOW_ROUNDS = 2  # rounds slower than decoding every drafted token one by one
_DRAFTED = 0  # the "size" of all drafts: their length varies


class AdaptiveDrafter(DraftController):
    """A drafter that adapts its length and pauses while it does not pay."""

    def __init__(self, drafter: Drafter, *, longest: int = LONGEST) -> None:
        costs = RoundCosts(window=WINDOW, baseline_window=5, first_pause=LENGTH_PACE.first_pause)
        super().__init__(costs, LENGTH_PACE)
        self.drafter = drafter
        self.longest = longest
        self.length = min(FIRST_LENGTH, longest)
        self._drafting_s = 0.0  # time that the drafter took in this round

    def propose(self, tokens: Sequence[int], most: int) -> list[int] | DraftTree:
        self._drafting_s = 0.0
        if not self._wants_draft():
            return []
        started = perf_counter()
        draft = self.drafter.propose(tokens, min(most, self.length))
        self._drafting_s = perf_counter() - started
        return draft if isinstance(draft, DraftTree) else draft[: self.length]

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        if not proposed:  # time of a drafter that proposed nothing is not part of the baseline
            self._learn_baseline(seconds - self._drafting_s)
            return None
        self._since_baseline += 1
        self.costs.add(_DRAFTED, proposed, accepted + 1, seconds)
        note = self.drafter.learn(proposed, accepted, seconds)
        if accepted == proposed:
            if proposed >= self.length:
                self.length = min(self.longest, 2 * self.length)
        else:
            # Not all the way down: the first tokens of a draft make a round expensive, and where a
            # text copies, a short draft would take many rounds to grow again.
            self.length = max(self.length // 2, min(self.length, accepted + 1), 1)
        return note if self._pays() else self._stop()

    def record(self, tokens: Sequence[int]) -> None:
        if isinstance(self.drafter, RecordingDrafter):
            self.drafter.record(tokens)

    @property
    def gain(self) -> float | None:
        """Speed with drafts relative to the baseline; None while unknown."""
        rounds = self.costs.rounds(_DRAFTED)
        if not rounds or not self.costs.count(BASELINE):
            return None
        return fmean(entry.tokens for entry in rounds) / max(self.cost, 1e-9)

    @property
    def cost(self) -> float:
        """Time of a drafted round relative to the baseline (medians)."""
        baseline = self.costs.median_s(BASELINE) if self.costs.count(BASELINE) else 0.0
        return self.costs.median_s(_DRAFTED) / baseline if baseline > 0 else 1.0

    def _pays(self) -> bool:
        rounds = self.costs.rounds(_DRAFTED)
        if len(rounds) >= HOPELESS_ROUNDS and all(entry.tokens == 1 for entry in rounds):
            return False
        if len(rounds) >= TOO_SLOW_ROUNDS and self.costs.count(BASELINE):
            baseline = self.costs.median_s(BASELINE)
            if all(entry.seconds > (entry.drafted + 1) * baseline for entry in rounds):
                return False  # it would not pay even if every token were accepted
        if len(rounds) < MIN_ROUNDS or self.gain is None:
            return True
        if self.gain > 1.0:
            if len(rounds) == WINDOW:
                self.costs.pause_length = self.pace.first_pause  # forget an earlier failure
            return True
        return False

    def _stop(self) -> str:
        rounds = self.costs.rounds(_DRAFTED)
        note = self._pause(
            f"drafting stopped: accepted {sum(e.tokens - 1 for e in rounds)} of "
            f"{sum(e.drafted for e in rounds)} tokens, a drafted run took {self.cost:.1f} times an "
            f"ordinary one; trying again after {self.costs.pause_length} tokens"
        )
        self.costs.clear(_DRAFTED)
        self._since_baseline = 0
        self.length = min(2, self.longest)
        return note


SHAPES = (
    DraftShape(5, min_probability=0.8),
    DraftShape(5, min_probability=0.6),
    DraftShape(5, min_probability=0.4),
    DraftShape(7, min_probability=0.25),
    DraftShape(7, min_probability=0.12),
    DraftShape(15, width=4, depth=6),
    DraftShape(31, width=8, depth=7),
)
SHAPE_PACE = Pace(
    first_baseline=8, baseline=3, baseline_every=64, baseline_after_pause=3, skip_first=True,
    first_pause=128, max_pause=4096,
)  # fmt: skip
FAST_STEP_S = 0.8e-3  # baseline round: making and handing over a draft takes as long
MIN_SHAPE_ROUNDS = 6  # rounds with a shape before it is judged
HOPELESS_COST, HOPELESS_AFTER = 2.0, 3  # smallest drafts this many times the baseline; rounds
OUTLIER = 3  # times the median: such a round waited for something else
STALE = 64  # drafted rounds after which a neighbouring shape is tried again
PAYS = 1.03  # times the baseline speed: less may be chance
NEARLY_PAYS = 0.92  # of the baseline speed: the next larger shape is worth a try
RESUME_READING = 16  # rounds before the end of a pause at which hidden states are read again


class ShapeController(DraftController):
    """The shape of the next draft of a head, for one text."""

    def __init__(self, costs: RoundCosts | None = None, most: int = SHAPES[-1].nodes) -> None:
        super().__init__(costs or RoundCosts(first_pause=SHAPE_PACE.first_pause), SHAPE_PACE)
        self.most = most  # tokens of a draft
        fits = [n for n, shape in enumerate(SHAPES) if shape.width == 1 or shape.nodes <= most]
        self.largest = max(fits)
        self.size = min(self.costs.size, self.largest)
        self.paused = self.costs.paused or int(self._is_fast())
        self._current: int | None = None  # size of the running round
        self._rounds = 0  # drafted ones
        self._rounds_here = 0  # ... of this size in a row
        self._last_used: dict[int, int] = {}  # size -> number of the drafted round

    @property
    def reading(self) -> bool:
        """Whether the head needs the hidden states of the running round."""
        measuring = self._current == BASELINE and not self.paused
        return self.paused <= RESUME_READING and (self.costs.observing_is_free or not measuring)

    def choose(self) -> DraftShape | None:
        """Shape of the next draft; None: decode without one."""
        self._current = self.size if self._wants_draft() else BASELINE
        if self._current == BASELINE:
            return None
        shape = SHAPES[self._current]
        return shape.within(self.most) if shape.width == 1 else shape

    def skip(self) -> None:
        """Do not measure this round: the head could not draft."""
        self._current = None

    def learn(self, accepted: int, seconds: float) -> str | None:
        """Record the round; returns a note if drafting pauses."""
        observed = self.reading
        size, self._current = self._current, None
        if size is None:
            return None
        if size == BASELINE:
            return self._learn_without_draft(seconds, observed)
        self.costs.add(size, 0, accepted + 1, seconds)
        self._rounds += 1
        self._rounds_here += 1
        self._since_baseline += 1
        self._last_used[size] = self._rounds
        if self._rounds_here == HOPELESS_AFTER and size == 0 and self._is_hopeless():
            return self._stop(self.costs.tokens_per_s(0) / self.costs.tokens_per_s(BASELINE))
        return self._move() if self._rounds_here >= MIN_SHAPE_ROUNDS else None

    def _learn_without_draft(self, seconds: float, observed: bool) -> str | None:
        was_paused = self.paused
        self._learn_baseline(seconds, counts=self.costs.observing_is_free or not observed)
        if was_paused or self._baseline_left or not self._is_fast():
            return None
        return self._pause_drafting(
            f"drafting rests: a token takes {1000 * self.costs.seconds(BASELINE):.2f} ms without a "
            "draft, which is about what making one takes"
        )

    def _is_fast(self) -> bool:
        """Whether decoding without drafts is faster than making one."""
        return self.costs.count(BASELINE) > 0 and self.costs.seconds(BASELINE) < FAST_STEP_S

    def _is_hopeless(self) -> bool:
        """Whether the smallest drafts are so slow that no acceptance rate makes up for it. Accepted
        tokens vary for a while; the time of a round is known soon."""
        costs = self.costs
        return costs.count(BASELINE) > 0 and costs.seconds(0) > HOPELESS_COST * costs.seconds(
            BASELINE
        )

    def _move(self) -> str | None:
        """Change to a better size, to a neighbour that is due for a try, or pause."""
        costs, here = self.costs, self.size
        neighbours = [size for size in (here - 1, here + 1) if 0 <= size <= self.largest]
        speeds = {
            size: costs.tokens_per_s(size) for size in range(self.largest + 1)
            if costs.count(size) >= MIN_SHAPE_ROUNDS
        }  # fmt: skip
        best = max(speeds, key=lambda size: speeds[size])
        baseline = costs.tokens_per_s(BASELINE) if costs.count(BASELINE) else 0.0
        untried = [
            size for size in neighbours
            if size not in speeds or self._rounds - self._last_used.get(size, -STALE) >= STALE
        ]  # fmt: skip
        # Try larger drafts only where drafts (nearly) pay, smaller ones only where they do not.
        pays, nearly = speeds[best] > PAYS * baseline, speeds[best] > NEARLY_PAYS * baseline
        untried = [size for size in untried if (nearly if size > here else not pays)]
        if best != here or untried:
            self.size, self._rounds_here = best if best != here else untried[0], 0
            return None
        if pays:
            costs.size, costs.pause_length = here, self.pace.first_pause
            return None
        return self._stop(speeds[best] / baseline)

    def _stop(self, gain: float) -> str:
        return self._pause_drafting(
            f"drafting stopped: with drafts of up to {SHAPES[self.size].nodes} the text came at "
            f"{gain:.2f} times the speed without; trying again after {self.costs.pause_length} "
            "tokens"
        )

    def _pause_drafting(self, note: str) -> str:
        self.costs.size = self.size = 0
        self._rounds_here = 0
        return self._pause(note)


class FixedShape:
    """Always the same shape, for measurements."""

    reading = True

    def __init__(self, shape: DraftShape) -> None:
        self.shape = shape

    def choose(self) -> DraftShape | None:
        return self.shape

    def skip(self) -> None:
        pass

    def learn(self, accepted: int, seconds: float) -> str | None:
        return None
