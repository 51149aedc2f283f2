"""The simulator against reality: the same short trace through real replicas and through the model.

Both get the same sessions at the same moments by the same routing policy. What is compared is what
a plan rests on: tokens a second, prompt tokens that had to be computed, times to the first token
and between tokens, and what the replicas took of their cores. What others took of these meanwhile
is told too: it is not predicted, and makes everything later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleets.arrivals import Arrivals
from fleets.costs import StepCosts
from fleets.figures import Figures, figures
from fleets.real import Client, CoreSeconds, RealFleet
from fleets.requests import Request
from fleets.simulate import Scenario, make_router, simulate
from fleets.trace import Lengths, Mix, Session, make_trace, requests_per_session

# Short enough for a small model on one core, and made of the same parts as the large one.
SMALL = Mix(
    applications=6, documents=4, chats=0.6, asked_documents=0.2, turns=3.0,
    system=Lengths(120, 0.4, 250), document=Lengths(200, 0.3, 350),
    question=Lengths(14, 0.6, 40), answer=Lengths(16, 0.5, 40), pause=Lengths(3, 0.5, 8),
    context=1200,
)  # fmt: skip
COMPARED = {
    "tokens/s": ("tokens_s", 1.0),
    "prompt tokens computed": ("prefill_tokens", 1.0),
    "first token p50, ms": ("first_p50", 1e3),
    "first token p99, ms": ("first_p99", 1e3),
    "between tokens p50, ms": ("gap_p50", 1e3),
    "between tokens p99, ms": ("gap_p99", 1e3),
}


@dataclass(frozen=True)
class Compared:
    """One figure of one policy."""

    policy: str
    name: str
    real: float
    predicted: float

    @property
    def error(self) -> float:
        """As a share of what really was."""
        return self.predicted / self.real - 1 if self.real else 0.0


def small_trace(seed: int, rate: float, seconds: float) -> list[Session]:
    """Sessions that come to so many requests a second."""
    sessions = rate / requests_per_session(SMALL)
    arrivals = Arrivals(sessions, day_swing=0.0, burst=3.0, burst_s=5.0, calm_s=20.0)
    return make_trace(seed, arrivals, seconds, SMALL)


def check(
    costs: StepCosts, sessions: Sequence[Session], folder: Path, policies: Sequence[str],
    replicas: int, options: Sequence[str],
) -> tuple[list[Compared], dict[str, float]]:  # fmt: skip
    """Every figure of every policy, real and predicted; and the share of all cores that others took
    meanwhile. Replicas begin empty for each policy."""
    found, others = list[Compared](), dict[str, float]()
    for policy in policies:
        run = simulate(Scenario(costs, replicas, policy), sessions)
        predicted = as_servers_tell(run.requests)
        with RealFleet(folder, replicas, options) as fleet:
            client = Client(fleet.replicas, make_router(policy, costs))
            before = CoreSeconds.now(fleet.replicas)
            real = as_servers_tell(asyncio.run(client.play(sessions)))
            used, others[policy] = CoreSeconds.now(fleet.replicas).since(before)
        found += [
            Compared(policy, name, getattr(real, key) * scale, getattr(predicted, key) * scale)
            for name, (key, scale) in COMPARED.items()
        ]
        busy = sum(replica.busy_s for replica in run.replicas)
        found.append(Compared(policy, "core seconds of the replicas", used, busy))
    return found, others


def as_servers_tell(requests: Sequence[Request]) -> Figures:
    """Prompt tokens computed, as servers tell it: those not found when the request came in."""
    for request in requests:
        request.computed = len(request.prompt) - request.cached
    return figures(requests)


def table(compared: Sequence[Compared]) -> str:
    lines = ["| policy | figure | real | predicted | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.policy} | {one.name} | {one.real:,.1f} | {one.predicted:,.1f} | {one.error:+.0%} |"
        for one in compared
    ]
    return "\n".join(lines) + "\n"


def as_json(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    return [
        {"policy": c.policy, "name": c.name, "real": c.real, "predicted": c.predicted,
         "error": c.error} for c in compared
    ]  # fmt: skip
