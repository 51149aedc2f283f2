"""Machines that are lost: when, for how long, and how soon anybody notices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Failures:
    """Each replica is lost at random, once in `mtbf_s` on average, or at the moments given."""

    mtbf_s: float | None = None  # mean time between failures of one replica; None: never
    moments: tuple[float, ...] = ()  # ... and these: the replica that is up longest is lost
    notice_s: float = 5.0  # until the router sends nothing there any more, and clients try again
    restart_s: float = 60.0  # until another machine is there; then the engine has to start
    attempts: int = 4  # of a request, before its client gives up

    def lifetime(self, seed: int, replica: int) -> float | None:
        """How long the replica of this number lives."""
        if self.mtbf_s is None:
            return None
        chance = np.random.default_rng([seed, 4, replica])
        return float(chance.exponential(self.mtbf_s))
