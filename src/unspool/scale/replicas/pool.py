"""A gateway's view of the replicas: which exist, their load, and which one to use."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from unspool.scale.replicas.asking import RouteHints
from unspool.scale.replicas.errors import no_replica

_WAIT_SECONDS = 30.0  # if there is no replica: one is probably starting
_SUSPECT_SECONDS = 5.0  # to avoid a replica after a broken connection, until Ray notices


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to send a request to."""

    name: str
    address: str  # host:port


class ReplicaChooser(Protocol):
    """Chooses among the known replicas: Ray, or a test."""

    async def choose(self, hints: RouteHints) -> Target:
        """Return the replica for a request and set `hints.replicas`.

        Waits while there is none. Raises ReplicaLostError if the only possible one is gone.
        """


class RayChooser:
    """Chooses with Ray Serve and the request router in `request_router.py`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def choose(self, hints: RouteHints) -> Target:
        # Without a reservation nothing is sent: the router in this process only returns the name.
        # Ray does the same where HAProxy forwards its requests.
        async with self._handle.choose_replica(hints, _reserve=False) as selection:
            name = selection.replica_id
        return Target(name, hints.replicas[name])


class ReplicaPool:
    """Chooses replicas and counts the requests in flight of each."""

    def __init__(self, chooser: ReplicaChooser, wait: float = _WAIT_SECONDS) -> None:
        self._chooser, self._wait = chooser, wait
        self.in_flight: collections.Counter[str] = collections.Counter()
        self._suspects: dict[str, float] = {}  # replicas to avoid, until a monotonic time

    async def choose(self, hints: RouteHints) -> Target:
        hints.load = dict(self.in_flight)
        now = monotonic()
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}
        if hints.kind != "kept":
            hints.avoid |= self._suspects.keys()
        try:
            async with asyncio.timeout(self._wait):
                return await self._chooser.choose(hints)
        except TimeoutError:
            raise no_replica() from None

    async def all(self, wait: float = 1.0) -> dict[str, str]:
        """Return all replicas: name -> address."""
        hints = RouteHints()
        try:
            async with asyncio.timeout(wait):
                await self._chooser.choose(hints)
        except TimeoutError:
            return {}
        return hints.replicas

    @contextmanager
    def count_in_flight(self, target: Target) -> Iterator[None]:
        self.in_flight[target.name] += 1
        try:
            yield
        finally:
            self.in_flight[target.name] -= 1
            if not self.in_flight[target.name]:
                del self.in_flight[target.name]

    def avoid(self, target: Target) -> None:
        """Avoid a replica for a while after a broken connection."""
        self._suspects[target.name] = monotonic() + _SUSPECT_SECONDS
