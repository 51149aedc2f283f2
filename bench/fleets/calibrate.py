"""Measure what the steps of our engine take on this machine, behind the real server.

As many replicas as a fleet here would have run at once, each on a core of its own, so that what
they take from each other (memory, caches) is in the figures, and so is what the server does on the
same core while the engine computes. The loads: a few to many texts written at once behind short and
long prompts, prompts alone, and prompts that are read while texts are written.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fleets.costs import Shape, StepCosts
from fleets.fitting import Measured, fit
from fleets.real import Client, RealFleet, RealReplica
from fleets.replica import Replica
from fleets.requests import Request
from unspool.costs.measuring import processor_name
from unspool.scale.replicas.routing import RoundRobin

SHORT = 64  # tokens of a prompt that is read in no time worth the name
MOST = 4  # times that a kind of step counts, however often it was measured
# Rounds of requests that begin together: how many, tokens of each prompt, tokens of each answer.
ROUNDS = (
    (1, 24, 24), (1, 900, 16), (2, 24, 16), (4, 24, 16), (4, 400, 12), (8, 24, 16), (8, 200, 12),
    (16, 24, 16), (16, 200, 12), (32, 24, 12), (1, 24, 4), (1, 64, 4), (1, 128, 4), (1, 256, 4),
    (1, 1500, 2), (1, 24, 4), (1, 48, 4),
)  # fmt: skip


def calibrate(
    name: str, folder: Path, replicas: int, options: Sequence[str], rounds: int = 2
) -> StepCosts:
    """A table of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"steps-{number}.json" for number in range(replicas)]
    began = time.perf_counter()
    with RealFleet(folder, replicas, options, logs) as fleet:
        start_s = time.perf_counter() - began
        waits = asyncio.run(_work(fleet.replicas, rounds))
    found = [json.loads(log.read_text(encoding="utf-8")) for log in logs]
    steps = [step for log in found for step in typical(measured(log["steps"]))]
    terms, error = fit(steps)
    costs = StepCosts(
        name=name,
        source=f"python bench/fleet.py calibrate, {replicas} at once on {processor_name()}, "
        f"{len(steps)} steps, median error of the fit {error:.1%}",
        shape=Shape(**found[0]["backend"], start_s=round(start_s, 2)),
        **terms,
    )
    return _with_request_s(costs, waits)


async def _work(replicas: Sequence[RealReplica], rounds: int) -> list[Request]:
    """The same load on every replica; gives back requests that came to an idle one."""
    alone: list[Request] = []
    chance = np.random.default_rng(0)
    for _ in range(rounds):
        for count, prompt, answer in ROUNDS:
            clients = [Client([replica], RoundRobin()) for replica in replicas]
            asked = [
                [_random(chance, number, prompt, answer, client.now) for number in range(count)]
                for client in clients
            ]
            async with asyncio.TaskGroup() as group:
                for client, mine in zip(clients, asked, strict=True):
                    for request in mine:
                        request.arrival = client.now
                        group.create_task(client.ask(request))
            if count == 1 and prompt <= SHORT:
                alone += [request for mine in asked for request in mine]
    return alone


def _random(
    chance: np.random.Generator, number: int, prompt: int, answer: int, now: float
) -> Request:
    tokens = (1000 + chance.integers(0, 30_000, prompt)).tolist()
    return Request(number, tokens, [0] * answer, now)


def measured(steps: Sequence[Any]) -> list[Measured]:
    """Steps that were followed by another at once: some text of theirs goes on in it. From the
    beginning of one to the beginning of the next is all that a step costs."""
    found = []
    for (began, slots, firsts, ends), (next_began, next_slots, next_firsts, _) in pairwise(steps):
        if set(zip(slots, ends, strict=True)) & set(zip(next_slots, next_firsts, strict=True)):
            rows = list(zip(firsts, ends, strict=True))
            found.append(_step(rows, next_began - began))
    return found


def _step(rows: Sequence[tuple[int, int]], seconds: float) -> Measured:
    """A step, by where each of its rows begins and ends."""
    next_tokens = [end for first, end in rows if end - first == 1]
    chunks = [(end - first, first + end + 1) for first, end in rows if end - first > 1]
    return Measured(
        rows=len(next_tokens),
        context=sum(next_tokens),
        prefill=sum(count for count, _ in chunks),
        pairs=sum(count * ends // 2 for count, ends in chunks),
        seconds=seconds,
    )


def typical(steps: Sequence[Measured]) -> list[Measured]:
    """One for each kind of step, the median of those like it: what else a machine does now and
    then is not what a step costs."""
    kinds: dict[tuple[int, ...], list[Measured]] = defaultdict(list)
    for step in steps:
        looked_at = int(np.log2(1 + step.context + step.pairs) * 4)
        kinds[step.rows, step.prefill, looked_at].append(step)
    found = []
    for like in kinds.values():
        middle = sorted(like, key=lambda step: step.seconds)[len(like) // 2]
        found += [middle] * min(len(like), MOST)
    return found


def _with_request_s(costs: StepCosts, alone: Sequence[Request]) -> StepCosts:
    """What passes beside the steps until the first token, of requests to an idle replica: of the
    quickest quarter the slowest, as a machine that does something else adds to all of them."""
    rest = []
    for request in alone:
        copy = Request(0, request.prompt, request.answer, 0.0)
        replica = Replica("idle", replace(costs, request_s=0.0), lambda request, now: None)
        ends = replica.submit(copy, 0.0)
        while copy.first < 0 and ends is not None:
            ends = replica.step_ended(ends)
        rest.append(request.first_token_s - copy.first)
    return replace(costs, request_s=max(0.0, sorted(rest)[len(rest) // 4]))
