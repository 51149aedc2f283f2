"""How many replicas there should be: as Ray Serve decides it, by requests in flight.

Every `interval_s` the mean of the requests in flight over the last `look_back_s` is divided by
`target`. When that has asked for more replicas for `up_delay_s` (or fewer, for `down_delay_s`), so
many are started (or drained). A replica that is started takes its start time to be of use.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Scaling:
    """The settings of Ray Serve's `autoscaling_config`, by shorter names, with its defaults."""

    least: int
    most: int
    target: float = 32.0  # target_ongoing_requests
    interval_s: float = 10.0  # metrics_interval_s
    look_back_s: float = 30.0
    up_delay_s: float = 30.0  # upscale_delay_s
    down_delay_s: float = 600.0  # downscale_delay_s


class Autoscaler:
    """Looks at the load, and says how many replicas it wants."""

    def __init__(self, scaling: Scaling, replicas: int) -> None:
        self.scaling = scaling
        self.num_logits = replicas
        self._seen: deque[tuple[float, int]] = deque()
        self._since: tuple[int, float] | None = None  # which way it wants to go, since when

    def look(self, now: float, in_flight: int) -> int:
        """How many replicas there should be from now on."""
        scaling, seen = self.scaling, self._seen
        seen.append((now, in_flight))
        while seen[0][0] < now - scaling.look_back_s:
            seen.popleft()
        mean = sum(count for _, count in seen) / len(seen)
        desired = min(max(math.ceil(mean / scaling.target), scaling.least), scaling.most)
        way = (desired > self.num_logits) - (desired < self.num_logits)
        if way == 0:
            self._since = None
        elif self._since is None or self._since[0] != way:
            self._since = (way, now)
        if self._since is not None:
            delay = scaling.up_delay_s if way > 0 else scaling.down_delay_s
            if now - self._since[1] >= delay:
                self.num_logits, self._since = desired, None
        return self.num_logits
