"""How the processes of a training find each other, also after torchrun has started them anew.

torchrun keeps one store of keys through all restarts, and what processes leave there of themselves
(addresses, above all) is found by those of a later life, who then wait for the dead. So every life
has keys of its own: the first process writes the name of the life, the others ask under that name
to be let in, and one that nobody answers has read an old name and looks again.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_LOOK = 0.05  # seconds between two looks at the store
_ANSWER = 2.0  # seconds after which a name that nobody answers for is taken to be old


def meet(timeout: timedelta) -> tuple[Any, int, int]:
    """A store for this life alone, this process's rank, and how many there are."""
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    until = time.monotonic() + timeout.total_seconds()
    life = _let_in(store, world, until) if rank == 0 else _ask(store, rank, until)
    return dist.PrefixStore(life, store), rank, world  # type: ignore[attr-defined]


def _let_in(store: Any, world: int, until: float) -> str:
    """What the first process does: name the life, and answer everybody who asks."""
    life = uuid.uuid4().hex
    store.set("unspool/life", life)
    waiting = set(range(1, world))
    while waiting:
        asking = {rank for rank in waiting if store.check([f"{life}/asks/{rank}"])}
        for rank in asking:
            store.set(f"{life}/answer/{store.get(f'{life}/asks/{rank}').decode()}", "come in")
        waiting -= asking
        _wait_a_little(until, f"{len(waiting)} of {world} processes have not come")
    return life


def _ask(store: Any, rank: int, until: float) -> str:
    while True:
        _wait_a_little(until, "the first process has not come")
        if not store.check(["unspool/life"]):
            continue
        life, me = str(store.get("unspool/life").decode()), uuid.uuid4().hex
        store.set(f"{life}/asks/{rank}", me)
        since = time.monotonic()
        while time.monotonic() < since + _ANSWER:
            if store.check([f"{life}/answer/{me}"]):
                return life
            _wait_a_little(until, "the first process does not answer")


def _wait_a_little(until: float, why: str) -> None:
    if time.monotonic() > until:
        raise dist.DistNetworkError(f"timed out: {why}")
    time.sleep(_LOOK)
