"""Real replicas on this machine: step costs measured on them, and the simulator checked with them.

Each replica is a process of `unspool serve` on one core. The client sends token ids to
`/completion`, whose events have the ids that were written, so that the next turn of a chat
continues exactly what the replica has cached.
"""

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from scipy.optimize import nnls

from fleets.simulate import (
    Figures,
    Replica,
    Router,
    Scenario,
    Shape,
    StepCosts,
    Table,
    figures,
    make_router,
    simulate,
)
from fleets.trace import SMALL, Arrivals, Request, Session, make_trace, requests_per_session
from lib.servers import CoreSeconds, RunningServer, Server
from unspool.costs.measuring import processor_name
from unspool.scale.replicas.routing import RoundRobin, page_hashes

ANSWERS_WITHIN_S = 600.0


class ReplicaError(Exception):
    """An answer did not come."""


class RealFleet:
    """Replicas 0, 1, ..., each on the core of its number; with `logs` their steps are recorded."""

    def __init__(
        self, folder: Path, count: int, options: Sequence[str] = (), logs: Sequence[Path] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        script = str(Path(__file__).with_name("record_steps.py"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.replicas: dict[str, RunningServer] = {}
        try:
            for core in range(count):
                program = [script, str(logs[core])] if logs else ["-m", "unspool"]
                words = ["serve", "--port", "{port}", "--threads", "1", *options]
                server = Server("us", "", (sys.executable, *program, *words))
                log = folder / f"replica-{core}.log"
                running = RunningServer(server, environment, log, core)
                self.replicas[f"replica {core}"] = running
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()

    def core_seconds(self) -> CoreSeconds:
        return CoreSeconds.now(*(replica.process.pid for replica in self.replicas.values()))


class Client:
    """Sends requests and records the times of tokens, in seconds since its start."""

    def __init__(self, replicas: dict[str, RunningServer], router: Router) -> None:
        self.ports = {name: replica.port for name, replica in replicas.items()}
        self.router, self.load = router, dict.fromkeys(self.ports, 0)
        self.requests: list[Request] = []
        for name in self.ports:
            router.add(name)
        self.start = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self.start

    async def play(self, sessions: Sequence[Session]) -> list[Request]:
        """Run all sessions, each from its start time."""
        self.start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(self._run_session(session))
        return sorted(self.requests, key=lambda request: request.number)

    async def _run_session(self, session: Session) -> None:
        await asyncio.sleep(session.begins - self.now)
        answers: list[list[int]] = []
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(turn.pause_s)
            prompt, index = session.prompt(number, answers), len(self.requests)
            request = Request(index, prompt, turn.answer, self.now, session.number, number)
            self.requests.append(request)
            answers.append(await self.ask(request))

    async def ask(self, request: Request) -> list[int]:
        """Send a request to the replica that the policy chooses; return the answer's tokens."""
        hashes = page_hashes(request.prompt)
        name = self.router.choose(hashes, self.load)
        self.router.record(name, hashes)
        request.replica, request.attempts = name, 1
        self.load[name] += 1
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                return await self._stream(request, self.ports[name])
        finally:
            self.load[name] -= 1

    async def _stream(self, request: Request, port: int) -> list[int]:
        body = json.dumps({
            "prompt": request.prompt, "n_predict": len(request.answer), "ignore_eos": True,
            "stream": True, "seed": request.number, "temperature": 0.8,
        })  # fmt: skip
        head = (
            f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        written: list[int] = []
        try:
            writer.write((head + body).encode())
            while line := await reader.readline():
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(line[5:])
                if event.get("stop"):
                    request.cached = event["tokens_cached"]
                    break
                written += event["tokens"]
                request.deliver(len(written), self.now)
        finally:
            writer.close()
        if len(written) != len(request.answer):
            raise ReplicaError(f"{len(written)} of {len(request.answer)} tokens came from {port}")
        request.computed = len(request.prompt) - request.cached
        request.end("finished")
        return written


# -- calibration: what the engine's steps cost on this machine -------------------------------------

SHORT = 64  # prompt tokens whose prefill time is negligible
MAX_WEIGHT = 4  # how often a kind of step counts at most
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Rounds of requests that start together: their number, prompt tokens and answer tokens.
ROUNDS = (
    (1, 24, 24), (1, 900, 16), (2, 24, 16), (4, 24, 16), (4, 400, 12), (8, 24, 16), (8, 200, 12),
    (16, 24, 16), (16, 200, 12), (32, 24, 12), (1, 24, 4), (1, 64, 4), (1, 128, 4), (1, 256, 4),
    (1, 1500, 2), (1, 24, 4), (1, 48, 4),
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredStep:
    """The arguments of `StepCosts.step`, and the seconds that it took."""

    rows: int
    context: int
    prefill: int
    pairs: int
    seconds: float


def calibrate(
    name: str, folder: Path, replicas: int, options: Sequence[str], rounds: int = 2
) -> StepCosts:
    """Measure a cost table on as many replicas as will run together, each on one core.

    So the figures include what replicas take from each other, and what the server does on the same
    core: decoding at many batch sizes after short and long prompts, and prompts alone and mixed.
    """
    logs = [folder / f"steps-{number}.json" for number in range(replicas)]
    with RealFleet(folder, replicas, options, logs) as fleet:
        start_s = max(replica.start_s for replica in fleet.replicas.values())
        alone = asyncio.run(_run_rounds(fleet.replicas, rounds))
    recorded = [json.loads(log.read_text(encoding="utf-8")) for log in logs]
    steps = [step for log in recorded for step in typical_steps(measured_steps(log["steps"]))]
    terms, error = fit_costs(steps)
    costs = StepCosts(
        name=name,
        source=f"python bench/fleet.py calibrate, {replicas} replicas on {processor_name()}, "
        f"{len(steps)} steps, median error of the fit {error:.1%}",
        shape=Shape(**recorded[0]["backend"], start_s=round(start_s, 2)),
        **terms,
    )
    # Time outside of the steps: requests to an idle replica minus their simulated steps; the first
    # quartile, as other work on the machine only adds to it.
    extra = []
    for request in alone:
        copy = Request(0, request.prompt, request.answer, 0.0)
        replica = Replica("idle", costs, lambda request, now: None)
        end = replica.submit(copy, 0.0)
        while copy.first < 0 and end is not None:
            end = replica.step_ended(end)
        extra.append(request.first_token_s - copy.first)
    return replace(costs, request_s=max(0.0, sorted(extra)[len(extra) // 4]))


async def _run_rounds(replicas: dict[str, RunningServer], rounds: int) -> list[Request]:
    """Put the same load on every replica; return short requests that came to an idle one."""
    alone: list[Request] = []
    random = np.random.default_rng(0)
    for count, prompt, answer in ROUNDS * rounds:
        clients = [Client({name: replica}, RoundRobin()) for name, replica in replicas.items()]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                for number in range(count):
                    tokens = (1000 + random.integers(0, 30_000, prompt)).tolist()
                    request = Request(number, tokens, [0] * answer, client.now)
                    client.requests.append(request)
                    group.create_task(client.ask(request))
        if count == 1 and prompt <= SHORT:
            alone += [request for client in clients for request in client.requests]
    return alone


def measured_steps(log: Sequence[Any]) -> list[MeasuredStep]:
    """Steps that were followed by another without a pause: one of their texts continues in it.

    The cost of a step is the time from its start to the start of the next.
    """
    steps = []
    for (start, slots, firsts, ends), (next_start, next_slots, next_firsts, _) in pairwise(log):
        if set(zip(slots, ends, strict=True)) & set(zip(next_slots, next_firsts, strict=True)):
            rows = list(zip(firsts, ends, strict=True))
            contexts = [end for first, end in rows if end - first == 1]
            chunks = [(end - first, first + end + 1) for first, end in rows if end - first > 1]
            prefill = sum(count for count, _ in chunks)
            pairs = sum(count * ends // 2 for count, ends in chunks)
            cost = next_start - start
            steps.append(MeasuredStep(len(contexts), sum(contexts), prefill, pairs, cost))
    return steps


def typical_steps(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The median of each kind of step, which excludes other work of the machine."""
    kinds: dict[tuple[int, ...], list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        attention = int(np.log2(1 + step.context + step.pairs) * 4)
        kinds[step.rows, step.prefill, attention].append(step)
    medians = []
    for similar in kinds.values():
        middle = sorted(similar, key=lambda step: step.seconds)[len(similar) // 2]
        medians += [middle] * min(len(similar), MAX_WEIGHT)
    return medians


def fit_costs(steps: Sequence[MeasuredStep]) -> tuple[dict[str, Any], float]:
    """Fit the terms of `StepCosts`, none below zero; also return the median relative error.

    Errors are relative, so that fast steps, which are most of them, count as much as slow ones.
    Each step is a weighted sum of the unknowns (increments of the tables between their knots, and
    the attention terms), which non-negative least squares finds.
    """
    rows, tokens = _knots([s.rows for s in steps]), _knots([s.prefill for s in steps])
    weights = np.array(
        [(*_ramps(s.rows, rows), *_ramps(s.prefill, tokens), s.context, s.pairs) for s in steps]
    )
    seconds = np.array([step.seconds for step in steps])
    scale = np.maximum(weights.max(axis=0), 1e-30)
    solution = nnls(weights / scale / seconds[:, None], np.ones(len(steps)))[0] / scale
    error = float(np.median(np.abs(weights @ solution / seconds - 1)))
    tables = np.cumsum(solution[: len(rows)]), np.cumsum(solution[len(rows) : -2])
    decode, prefill = (tuple(map(float, values)) for values in tables)
    terms = {"decode": Table(rows, decode), "prefill": Table(tokens, prefill)}
    return {**terms, "context_s": float(solution[-2]), "pair_s": float(solution[-1])}, error


def _knots(numbers: Sequence[int]) -> tuple[int, ...]:
    """Knots near which something was measured."""
    near = [k for k in KNOTS if any(0.75 * k <= number <= 1.5 * k for number in numbers)]
    return tuple(near) or KNOTS[:1]


def _ramps(number: int, knots: Sequence[int]) -> list[float]:
    """Weights of the first knot's seconds and of the increments between the knots."""
    if not number:
        return [0.0] * len(knots)
    rises = [(number - before) / (knot - before) for before, knot in pairwise(knots)]
    inner = [min(max(rise, 0.0), 1.0) for rise in rises[:-1]]
    return [1.0, *inner, *(max(rise, 0.0) for rise in rises[-1:])]


# -- check: the simulator against real replicas ----------------------------------------------------

COMPARED = {
    "tokens/s": ("tokens_s", 1.0),
    "prompt tokens computed": ("prefill_tokens", 1.0),
    "first token p50, ms": ("first_p50", 1e3),
    "first token p99, ms": ("first_p99", 1e3),
    "between tokens p50, ms": ("gap_p50", 1e3),
    "between tokens p99, ms": ("gap_p99", 1e3),
}


def small_trace(seed: int, rate: float, seconds: float) -> list[Session]:
    """Sessions that amount to `rate` requests per second."""
    arrivals = Arrivals(rate / requests_per_session(SMALL), calm_s=20.0)
    return make_trace(seed, arrivals, seconds, SMALL)


def check(
    costs: StepCosts, sessions: Sequence[Session], folder: Path, policies: Sequence[str],
    replicas: int, options: Sequence[str],
) -> tuple[list[dict[str, Any]], dict[str, float]]:  # fmt: skip
    """Every figure of every policy, real and predicted, and the share of cores used by others.

    Both get the same sessions at the same times. Replicas start empty for each policy. Other work
    on the machine is not predicted, and delays everything.
    """
    rows, others = list[dict[str, Any]](), dict[str, float]()
    for policy in policies:
        run = simulate(Scenario(costs, replicas, policy), sessions)
        predicted = server_figures(run.requests)
        with RealFleet(folder, replicas, options) as fleet:
            client = Client(fleet.replicas, make_router(policy, costs))
            before = fleet.core_seconds()
            real = server_figures(asyncio.run(client.play(sessions)))
            used, others[policy] = fleet.core_seconds().since(before)
        pairs = {
            name: (getattr(real, key) * scale, getattr(predicted, key) * scale)
            for name, (key, scale) in COMPARED.items()
        }
        pairs["core seconds of the replicas"] = used, sum(r.busy_s for r in run.replicas)
        for name, (value, prediction) in pairs.items():
            error = prediction / value - 1 if value else 0.0
            row = {"policy": policy, "name": name, "real": value, "predicted": prediction}
            rows.append({**row, "error": error})
    return rows, others


def server_figures(requests: Sequence[Request]) -> Figures:
    """Figures that count computed prompt tokens as servers do: those not cached on arrival."""
    for request in requests:
        request.computed = len(request.prompt) - request.cached
    return figures(requests)
