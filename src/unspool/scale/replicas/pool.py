"""The replicas as a gateway sees them: who there is, how busy each is, and whom to ask."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from unspool.scale.replicas.asking import Asked
from unspool.scale.replicas.errors import no_replica

_WAIT_SECONDS = 30.0  # for a replica, where there is none: one is being started, probably
_SUSPECT_SECONDS = 5.0  # that a replica which hung up is not asked: Ray finds out meanwhile


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to send a request to."""

    name: str
    address: str  # host:port


class Chooser(Protocol):
    """Who knows the replicas: Ray, or a test."""

    async def choose(self, asked: Asked) -> Target:
        """The replica for a request; raises `ReplicaLostError` if the only one is not there.
        Waits while there is none at all. Fills in `asked.replicas`."""


class RayChooser:
    """Asks Ray Serve, whose request router is ours (`request_router.py`)."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def choose(self, asked: Asked) -> Target:
        # Without a reservation nothing is sent: the router in this process only says who it is. Ray
        # does the same where HAProxy forwards its requests.
        async with self._handle.choose_replica(asked, _reserve=False) as selection:
            name = selection.replica_id
        return Target(name, asked.replicas[name])


class Pool:
    """Chooses replicas, and counts what each has in flight."""

    def __init__(self, chooser: Chooser, wait: float = _WAIT_SECONDS) -> None:
        self._chooser, self._wait = chooser, wait
        self.in_flight: Counter[str] = Counter()
        self._suspects: dict[str, float] = {}  # until when

    async def choose(self, asked: Asked) -> Target:
        asked.load = dict(self.in_flight)
        now = monotonic()
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}
        if asked.kind != "kept":
            asked.avoid |= self._suspects.keys()
        try:
            async with asyncio.timeout(self._wait):
                return await self._chooser.choose(asked)
        except TimeoutError:
            raise no_replica() from None

    async def all(self, wait: float = 1.0) -> dict[str, str]:
        """Every replica there is: name -> address."""
        asked = Asked()
        try:
            async with asyncio.timeout(wait):
                await self._chooser.choose(asked)
        except TimeoutError:
            return {}
        return asked.replicas

    @contextmanager
    def counted(self, target: Target) -> Iterator[None]:
        self.in_flight[target.name] += 1
        try:
            yield
        finally:
            self.in_flight[target.name] -= 1
            if not self.in_flight[target.name]:
                del self.in_flight[target.name]

    def suspect(self, target: Target) -> None:
        """It hung up: it is probably lost, and not asked for a while."""
        self._suspects[target.name] = monotonic() + _SUSPECT_SECONDS
