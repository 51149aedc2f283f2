"""Rendezvous of the training processes that survives restarts by torchrun.

torchrun keeps one key-value store through all restarts. Keys left by processes of an earlier
attempt (addresses above all) would make the new ones wait for dead peers. So each attempt uses its
own key prefix: rank 0 writes the attempt's id, the others ask to join under it, and a process that
gets no answer has read the id of an earlier attempt and reads it again.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_POLL_STORE_S = 0.05
_REPLY_TIMEOUT_S = 2.0  # without a reply in this time, the attempt id is an old one


def join_processes(timeout: timedelta) -> tuple[Any, int, int]:
    """Meet the other processes; returns a store for this attempt, the rank and the world size."""
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    deadline = time.monotonic() + timeout.total_seconds()
    attempt = _admit_others(store, world, deadline) if rank == 0 else _join(store, rank, deadline)
    return dist.PrefixStore(attempt, store), rank, world  # type: ignore[attr-defined]


def _admit_others(store: Any, world: int, deadline: float) -> str:
    """Rank 0: publish the attempt id, and reply to every process that asks to join."""
    attempt = uuid.uuid4().hex
    store.set("unspool/life", attempt)
    missing = set(range(1, world))
    while missing:
        asking = {rank for rank in missing if store.check([f"{attempt}/asks/{rank}"])}
        for rank in asking:
            store.set(f"{attempt}/answer/{store.get(f'{attempt}/asks/{rank}').decode()}", "come in")
        missing -= asking
        _sleep_until(deadline, f"{len(missing)} of {world} processes are missing")
    return attempt


def _join(store: Any, rank: int, deadline: float) -> str:
    while True:
        _sleep_until(deadline, "the first process is missing")
        if not store.check(["unspool/life"]):
            continue
        attempt, request = str(store.get("unspool/life").decode()), uuid.uuid4().hex
        store.set(f"{attempt}/asks/{rank}", request)
        asked_at = time.monotonic()
        while time.monotonic() < asked_at + _REPLY_TIMEOUT_S:
            if store.check([f"{attempt}/answer/{request}"]):
                return attempt
            _sleep_until(deadline, "the first process does not reply")


def _sleep_until(deadline: float, reason: str) -> None:
    """Sleep a moment; fail after the deadline."""
    if time.monotonic() > deadline:
        raise dist.DistNetworkError(f"timed out: {reason}")
    time.sleep(_POLL_STORE_S)
