"""Ray Serve's request router with prefix routing: see `scale/replicas/routing.py`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from unspool.scale.replicas.gateway import ReplicaLostError
from unspool.scale.replicas.routing import (
    CAPACITY,
    SLACK,
    PrefixRouter,
    RoundRobin,
    RouteHints,
    session_replica,
    tolerated_load,
)


class PolicyRouter:
    """The routing policy, without Ray."""

    def __init__(
        self, policy: str = "prefix", slack: float = SLACK, capacity_pages: int = CAPACITY
    ) -> None:
        self.slack = slack
        self.router: PrefixRouter | RoundRobin = RoundRobin()
        if policy == "prefix":
            self.router = PrefixRouter(slack=slack, capacity_pages=capacity_pages)

    def update(self, replicas: Collection[str]) -> None:
        """Set the replicas that exist now."""
        for name in set(self.router.replicas) - set(replicas):
            self.router.remove(name)
        for name in replicas:
            self.router.add(name)

    def choose(self, hints: RouteHints) -> str:
        replicas = self.router.replicas
        if hints.kind == "kept":
            if hints.replica not in replicas:
                raise ReplicaLostError(hints.replica)
            return hints.replica
        allowed = [name for name in replicas if name not in hints.avoid] or replicas
        if hints.session:
            preferred = session_replica(hints.session, allowed)
            min_load = min(hints.load.get(name, 0) for name in allowed)
            excess = hints.load.get(preferred, 0) - min_load
            if excess <= tolerated_load(self.slack, hints.load, allowed) or hints.kind == "shared":
                return preferred
        replica = self.router.choose(hints.hashes, hints.load, hints.avoid)
        self.router.record(replica, hints.hashes)
        return replica


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Runs in every process with a handle to the replicas: in each gateway."""

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
        hints = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(hints, RouteHints):
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        hints.replicas = {
            name: replica.replica_metadata["address"] for name, replica in by_name.items()
        }
        self._policy.update(by_name.keys())
        return [[by_name[self._policy.choose(hints)]]]
