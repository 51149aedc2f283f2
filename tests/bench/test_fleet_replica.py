"""A simulated replica does what the real engine does: the same rows in the same steps, the same
prefixes result, the same texts preempted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleets.simulate import Replica, RunningRequest, Shape, StepCosts, Table
from fleets.trace import Request
from helpers.engine_support import pause_thread
from helpers.null_model import NullModel
from unspool.backends.step import StepLimits
from unspool.engine.engine import Engine
from unspool.engine.request import Limits
from unspool.engine.request import Request as EngineRequest
from unspool.sampling import SamplingSettings

LIMITS = StepLimits(max_rows=8, prefill_tokens=48, prefill_beside_decode=32)
SMALL = Shape(
    page_size=4, page_count=64, max_rows=8, prefill_tokens=48, prefill_beside_decode=32,
    max_running=100,
)  # fmt: skip
ONE_SECOND = StepCosts("test", "", Table((1,), (1.0,)), Table((1,), (1.0,)), shape=SMALL)


def prompts(seed: int, count: int) -> list[list[int]]:
    """Some of them begin alike, and all are short enough for the null model's memory."""
    random = np.random.default_rng(seed)
    openings = [random.integers(0, 40, length).tolist() for length in (0, 9, 24)]
    return [
        [*openings[int(random.integers(3))], *random.integers(0, 40, random.integers(1, 30))]
        for _ in range(count)
    ]


def written(engine: Engine, texts: list[list[int]], counts: list[int], together: bool) -> Any:
    """What the real engine writes and what it reused of each prompt; `together`, it begins when
    all are there, otherwise each is written before the next one comes."""
    resume = pause_thread(engine) if together else None
    streams, tokens = [], []
    for number, (prompt, count) in enumerate(zip(texts, counts, strict=True)):
        request = EngineRequest(
            prompt=tuple(int(token) for token in prompt),
            settings=SamplingSettings(seed=number),
            limits=Limits(max_tokens=count, context=500),
        )
        streams.append(engine.submit(request))
        if not together:
            tokens.append([step.token for step in streams[-1]])
    if resume is not None:
        resume.set()
        tokens = [[step.token for step in stream] for stream in streams]
    return tokens, [stream.prompt_reused for stream in streams]


class Watched(Replica):
    """Writes down what each step brings."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__("watched", costs, lambda request, now: None)
        self.runs: list[list[int]] = []

    def _launch(self, rows: Any) -> Any:
        self.runs.append([task.scheduled_end - task.scheduled_start for task in rows])
        return super()._launch(rows)


def run_dry(replica: Replica, ends: float | None) -> None:
    while ends is not None:
        ends = replica.step_ended(ends)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("pages", [64, 22])
def test_the_same_rows_in_the_same_steps(
    overlaps: bool, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = prompts(7, 14)
    counts = [int(n) for n in np.random.default_rng(3).integers(1, 25, len(texts))]
    model = NullModel(pages=pages, limits=LIMITS, overlaps=overlaps)
    engine = Engine(model, lambda token: b"x")
    answers, reused = written(engine, texts, counts, together=True)
    preemptions = engine.scheduler.preemptions
    engine.close()

    def known_to_end(self: RunningRequest) -> bool:  # as if max_tokens is known
        return self.written + 1 < len(self.request.answer) and usual(self)

    usual = RunningRequest.run_ahead
    monkeypatch.setattr(RunningRequest, "run_ahead", known_to_end)
    shape = replace(SMALL, page_count=pages, overlaps=overlaps)
    replica = Watched(replace(ONE_SECOND, shape=shape))
    requests = [Request(n, p, a, 0.0) for n, (p, a) in enumerate(zip(texts, answers, strict=True))]
    replica.queued.extend(requests)
    replica._fill()
    run_dry(replica, 0.0)
    assert replica.runs == model.runs
    assert [request.cached for request in requests] == reused
    assert replica.scheduler.preemptions == preemptions
    assert (preemptions > 0) == (pages == 22)
    assert all(request.outcome == "finished" for request in requests)


def test_prefixes_result_and_evicted_as_in_the_real_tree() -> None:
    texts = prompts(11, 60)
    counts = [1 + n % 7 for n in range(len(texts))]
    engine = Engine(NullModel(pages=40, limits=LIMITS), lambda token: b"x")
    answers, reused = written(engine, texts, counts, together=False)
    engine.close()
    costs = replace(ONE_SECOND, shape=replace(SMALL, page_count=40))
    replica = Replica("one", costs, lambda request, now: None)
    result = []
    for number, (prompt, answer) in enumerate(zip(texts, answers, strict=True)):
        request = Request(number, prompt, answer, 0.0)
        run_dry(replica, replica.submit(request, 0.0))
        result.append(request.cached)
    assert result == reused
    assert sum(result) > 0 and result.count(0) > 3


def test_an_idle_replica_takes_the_bare_step_costs() -> None:
    costs = StepCosts(
        "test", "", Table((1, 3), (0.5, 0.7)), Table((10, 20), (2.0, 3.0)),
        context_s=0.001, pair_s=0.0001, shape=Shape(prefill_tokens=16, prefill_beside_decode=8),
    )  # fmt: skip
    request = Request(0, list(range(100, 120)), [1, 2, 3], 0.0)
    replica = Replica("one", costs, lambda request, now: None)
    run_dry(replica, replica.submit(request, 0.0))
    first = costs.prefill(16) + 16 * 17 / 2 * 0.0001
    second = costs.prefill(4) + 4 * (16 + 20 + 1) // 2 * 0.0001
    third, fourth = 0.5 + 21 * 0.001, 0.5 + 22 * 0.001
    assert request.first == pytest.approx(first + second)
    assert list(request.gaps) == pytest.approx([third, fourth])
    assert request.computed == 20 and request.cached == 0


def test_more_requests_than_may_wait_are_refused() -> None:
    shape = replace(SMALL, max_running=1, max_queued=2)
    replica = Replica("one", replace(ONE_SECOND, shape=shape), lambda request, now: None)
    requests = [Request(n, [n, 1], [2, 3], 0.0) for n in range(5)]
    ends = [replica.submit(request, 0.0) for request in requests]
    run_dry(replica, next(moment for moment in ends if moment is not None))
    outcomes = [request.outcome for request in requests]
    assert outcomes == ["finished", "finished", "finished", "refused", "refused"]
