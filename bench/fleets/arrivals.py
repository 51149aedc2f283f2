"""When sessions begin: the curve of a day, times bursts.

People come by day more than by night, and they come in bursts: a link is shared, a class begins, a
job is started. So the rate at a moment is the mean rate, times a curve over the day, times a factor
that jumps between calm and burst (a Markov-modulated Poisson process). Both factors are 1 on
average, so that the mean rate is what was asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numpy.random import Generator


@dataclass(frozen=True)
class Arrivals:
    """How sessions begin, so many a second on average over a whole day."""

    rate: float
    day_swing: float = 0.5  # the busiest moment has 1 + this times the mean rate
    busiest_hour: float = 15.0
    burst: float = 3.0  # the rate of a burst, in rates of a calm time; 1: no bursts
    burst_s: float = 5.0  # how long a burst lasts, on average
    calm_s: float = 25.0
    jump_at: float | None = None  # from this second on the rate is another
    jump: float = 1.0  # ... so many times what it was

    def times(self, chance: Generator, seconds: float, start_hour: float = 15.0) -> list[float]:
        """The moments within so many seconds, the first of which is at that hour of the day."""
        calm = (self.calm_s + self.burst_s) / (self.calm_s + self.burst * self.burst_s)
        found: list[float] = []
        now, bursting = 0.0, chance.random() < self.burst_s / (self.calm_s + self.burst_s)
        while now < seconds:
            until = min(
                seconds, now + chance.exponential(self.burst_s if bursting else self.calm_s)
            )
            rate = self.rate * calm * (self.burst if bursting else 1.0)
            found += self._thinned(chance, now, until, rate, start_hour)
            now, bursting = until, not bursting
        return found

    def factor(self, seconds: float, start_hour: float) -> float:
        """Of the rate at a moment, by the day (1 on average) and by the jump."""
        hours = start_hour + seconds / 3600 - self.busiest_hour
        day = 1 + self.day_swing * math.cos(2 * math.pi * hours / 24)
        jumped = self.jump_at is not None and seconds >= self.jump_at
        return day * (self.jump if jumped else 1.0)

    def _thinned(
        self, chance: Generator, now: float, until: float, rate: float, start_hour: float
    ) -> list[float]:
        """Arrivals at the highest rate, each kept with the share that its moment has of it."""
        highest = (1 + self.day_swing) * max(1.0, self.jump)
        found: list[float] = []
        while rate > 0:
            now += chance.exponential(1 / (rate * highest))
            if now >= until:
                break
            if chance.random() * highest < self.factor(now, start_hour):
                found.append(now)
        return found
