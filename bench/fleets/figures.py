"""What a run comes to, in figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fleets.requests import Request
from fleets.simulate import Outcome


@dataclass(frozen=True)
class Figures:
    """Of the requests that came within a window; seconds, and counts."""

    requests: int
    finished: int
    refused: int
    lost: int
    retried: int
    tokens_s: float  # written, a second
    prompt_tokens: int
    prefill_tokens: int  # of these, computed
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    rows: float = 0.0  # texts that got a token in a step, on average
    preemptions: int = 0

    @property
    def cached(self) -> float:
        """The share of the prompts that was not computed."""
        return 1 - self.prefill_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def figures(requests: Sequence[Request], since: float = 0.0, until: float = 1e18) -> Figures:
    """Of those that came within a window."""
    seen = [r for r in requests if since <= r.arrival < until]
    done = [r for r in seen if r.outcome == "finished"]
    began = min((r.arrival for r in seen), default=0.0)
    ended = max((r.last for r in done), default=began)
    gaps = np.concatenate([np.frombuffer(r.gaps) for r in done if r.gaps] or [np.zeros(0)])
    first = [r.first_token_s for r in done]
    return Figures(
        requests=len(seen),
        finished=len(done),
        refused=sum(r.outcome == "refused" for r in seen),
        lost=sum(r.outcome == "lost" for r in seen),
        retried=sum(r.attempts > 1 for r in seen),
        tokens_s=sum(len(r.answer) for r in done) / max(1e-9, ended - began),
        prompt_tokens=sum(len(r.prompt) for r in done),
        prefill_tokens=sum(r.computed for r in done),
        first_p50=percentile(first, 50),
        first_p99=percentile(first, 99),
        gap_p50=percentile(gaps, 50),
        gap_p99=percentile(gaps, 99),
    )


def of_run(found: Outcome, since: float = 0.0, until: float = 1e18) -> Figures:
    """Of a whole fleet, with what its replicas know beside."""
    steps = sum(replica.steps for replica in found.replicas)
    return replace(
        figures(found.requests, since, until),
        rows=sum(replica.decode_tokens for replica in found.replicas) / max(1, steps),
        preemptions=sum(replica.scheduler.preemptions for replica in found.replicas),
    )


def percentile(values: Iterable[float], share: float) -> float:
    """None of them: zero, so that tables stay tables."""
    array = np.fromiter(values, float) if not isinstance(values, np.ndarray) else values
    return float(np.percentile(array, share)) if len(array) else 0.0
