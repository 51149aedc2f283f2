"""Ray Serve's request router, with our policy: see `scale/routing.py`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from unspool.scale.replicas.asking import Asked
from unspool.scale.replicas.errors import ReplicaLostError
from unspool.scale.routing import (
    CAPACITY,
    SLACK,
    PrefixRouter,
    RoundRobin,
    session_replica,
    tolerated,
)


class PolicyRouter:
    """The decision itself, without Ray: whom of those that are there a request goes to."""

    def __init__(
        self, policy: str = "prefix", slack: float = SLACK, capacity_pages: int = CAPACITY
    ) -> None:
        self.slack = slack
        self.router: PrefixRouter | RoundRobin = RoundRobin()
        if policy == "prefix":
            self.router = PrefixRouter(slack=slack, capacity_pages=capacity_pages)

    def update(self, replicas: Collection[str]) -> None:
        """These are there now, and no others."""
        for name in set(self.router.replicas) - set(replicas):
            self.router.remove(name)
        for name in replicas:
            self.router.add(name)

    def choose(self, asked: Asked) -> str:
        known = self.router.replicas
        if asked.kind == "kept":
            if asked.replica not in known:
                raise ReplicaLostError(asked.replica)
            return asked.replica
        allowed = [name for name in known if name not in asked.avoid] or known
        if asked.session:
            favourite = session_replica(asked.session, allowed)
            least = min(asked.load.get(name, 0) for name in allowed)
            busier = asked.load.get(favourite, 0) - least
            if busier <= tolerated(self.slack, asked.load, allowed) or asked.kind == "shared":
                return favourite
        chosen = self.router.choose(asked.hashes, asked.load, asked.avoid)
        self.router.record(chosen, asked.hashes)
        return chosen


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not looked at
    """In every process that has a handle to the replicas: in each gateway."""

    def initialize_state(self, **options: Any) -> None:
        self._policy = PolicyRouter(**options)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._policy.update([replica.replica_id.unique_id for replica in replicas])
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.update([replica.unique_id for replica in self.curr_replicas])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        asked = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(asked, Asked):
            return [candidate_replicas]
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        asked.replicas = {
            name: replica.replica_metadata["address"] for name, replica in found.items()
        }
        self._policy.update(found.keys())
        return [[found[self._policy.choose(asked)]]]
