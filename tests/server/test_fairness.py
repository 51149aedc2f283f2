"""One request cannot hold up the others, and a client that leaves takes its work with it.

The engine's steps are held back at a gate, so that nothing depends on how quick a machine is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from helpers.running_server import (
    Running,
    connect,
    raw_post,
    running,
    settled,
    wait_until,
)
from unspool.backends.step import StepBatch, StepLimits
from unspool.engine.work_scope import WorkScope
from unspool.server.runtime.registry import ModelEntry

MANY = [f"{n} text to be embedded, and long enough" for n in range(96)]


@pytest.fixture(scope="module")
def tiny_server(small_entry: ModelEntry) -> Iterator[Running]:
    with running([replace(small_entry, name="tiny")]) as server:
        engine = server.state.registry.loaded["tiny"].lm.engine
        engine.scheduler.limits = StepLimits(prefill_tokens=16, prefill_beside_decode=16)
        yield server


class Gate:
    """Holds back the steps of a server's engine while it is closed."""

    def __init__(self, server: Running) -> None:
        self.server, self.engine = server, server.state.registry.loaded["tiny"].lm.engine
        self.steps: list[list[int]] = []
        self._is_held, self._open = threading.Event(), threading.Event()
        self._launch: Callable[[StepBatch], Any] = self.engine.backend.launch

    def __enter__(self) -> Gate:
        self.engine.backend.launch = self._wait_and_launch
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()
        settled(self.server)
        self.engine.backend.launch = self._launch

    def _wait_and_launch(self, batch: StepBatch) -> Any:
        self.steps.append(batch.tokens.tolist())
        self._is_held.set()
        assert self._open.wait(60)
        return self._launch(batch)

    def wait(self) -> None:
        assert self._is_held.wait(30), "no step was launched"

    def open(self) -> None:
        self._open.set()


def post(server: Running, path: str, body: Any) -> Any:
    return server.http.post(path, json=body).raise_for_status().json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": MANY}),
        ("/v1/completions", {"prompt": MANY, "max_tokens": 4}),
        ("/v1/completions", {"prompt": MANY, "max_tokens": 0, "echo": True, "logprobs": 1}),
    ],
)
def test_a_request_of_many_rows_leaves_room_for_others(tiny_server, path, body):
    lm = tiny_server.state.registry.loaded["tiny"].lm
    engine, (mark,) = lm.engine, lm.tokenizer.encode("~")
    with Gate(tiny_server) as gate, ThreadPoolExecutor(2) as threads:
        many = threads.submit(post, tiny_server, path, body)
        gate.wait()
        # What computes nothing is answered while no step runs at all.
        assert post(tiny_server, "/tokenize", {"content": "some words"})["count"] > 0
        assert post(tiny_server, "/detokenize", {"tokens": [1, 2]})
        for open_path in ("/health", "/v1/models", "/props", "/metrics"):
            assert tiny_server.http.get(open_path).status_code == 200
        before = set(engine._waiting)
        single = threads.submit(
            post, tiny_server, "/v1/completions", {"prompt": "~" * 10, "max_tokens": 1}
        )
        wait_until(lambda: set(engine._waiting) - before)
        holder = len(gate.steps)
        gate.open()
        assert single.result(60)["choices"]
        many.result(60)
    first = next(n for n, tokens in enumerate(gate.steps) if mark in tokens)
    assert len(gate.steps) > holder + 50 and first < holder + 20


def test_places_of_a_request_of_many_rows_are_not_all_places(tiny_server: Running):
    admission = tiny_server.state.admission
    with Gate(tiny_server) as gate, ThreadPoolExecutor(2) as threads:
        body = {"prompt": MANY, "max_tokens": 1}
        many = threads.submit(post, tiny_server, "/v1/completions", body)
        gate.wait()
        wait_until(lambda: admission.running >= 32)
        assert admission.running < admission.max_running
        gate.open()
        assert len(many.result(60)["choices"]) == len(MANY)


def test_blocked_threads_of_many_requests_do_not_block_others(tiny_server: Running):
    """40 requests whose threads wait for the engine, and of which the clients stay."""
    served = tiny_server.state.registry.loaded["tiny"]
    engine = served.lm.engine
    with Gate(tiny_server) as gate, ThreadPoolExecutor(41) as threads:
        scores = [threads.submit(post, tiny_server, "/score", {"text": "words"}) for _ in range(40)]
        gate.wait()
        wait_until(lambda: served.users == 40)
        assert post(tiny_server, "/tokenize", {"content": "some words"})["count"] > 0
        single = threads.submit(
            post, tiny_server, "/v1/completions", {"prompt": "~" * 10, "max_tokens": 1}
        )
        wait_until(lambda: engine._waiting)
        gate.open()
        assert single.result(60)["choices"]
        assert all(score.result(60) for score in scores)


LONG = "a long text which takes the model many steps to read, " * 4


THINK = {"think": {"policy": "best-of", "n": 3}}
SEARCH = {"prompt": LONG, **THINK, "max_tokens": 30}
CHAT = {"messages": [{"role": "user", "content": LONG}], "unspool": THINK, "max_tokens": 30}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "score": ("/score", {"text": LONG}),
    "echo": ("/v1/completions", {"prompt": LONG, "max_tokens": 0, "echo": True, "logprobs": 1}),
    "embed": ("/v1/embeddings", {"input": [LONG, *MANY]}),
    "complete": ("/v1/completions", {"prompt": MANY, "max_tokens": 100}),
    "streamed": ("/v1/completions", {"prompt": LONG, "max_tokens": 100, "stream": True}),
    "infill": ("/v1/completions", {"prompt": LONG, "suffix": " and an end.", "max_tokens": 8}),
    "think": ("/v1/think", SEARCH),
    "streamed think": ("/v1/think", {**SEARCH, "stream": True}),
    "think in a chat": ("/v1/chat/completions", CHAT),
    "streamed think in a chat": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "choose": ("{branch}/choose", {"at": 2, "text": "other words"}),
    "append": ("{branch}/append", {"text": "other words"}),
    "try": ("{branch}/try", {"at": 2, "temperature": 0.5}),
    "fill": ("{branch}/fill", {"first": 1, "last": 3}),
    "doubt": ("{branch}/doubt", {}),
    "revise": ("{branch}/revise", {"stream": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_computed_for_a_client_that_has_left(tiny_server, kind, monkeypatch):
    path, body = KINDS[kind]
    if "{branch}" in path:
        branch = f"/v1/tree/{post(tiny_server, '/v1/tree', {'prompt': LONG})['id']}"
        post(tiny_server, f"{branch}/resume", {"max_tokens": 8, "temperature": 0})
        path = path.format(branch=branch)
    served = tiny_server.state.registry.loaded["tiny"]
    settled(tiny_server)
    cancelled = list[WorkScope]()
    cancel = WorkScope.cancel
    monkeypatch.setattr(WorkScope, "cancel", lambda scope: (cancel(scope), cancelled.append(scope)))
    with Gate(tiny_server) as gate:
        client = connect(tiny_server, raw_post(path, body))
        gate.wait()
        client.close()
        # Some calls wait for their thread before they end.
        wait_until(lambda: cancelled or not served.users)
        gate.open()
        settled(tiny_server)
    assert len(gate.steps) < 4  # of 14 or more


def test_a_deadline_ends_the_work_too(tiny_server: Running):
    settings = tiny_server.state.settings
    object.__setattr__(settings, "deadline", 0.3)
    try:
        with Gate(tiny_server) as gate:
            answer = tiny_server.http.post("/score", json={"text": LONG})
            assert answer.status_code == 504
            assert tiny_server.state.admission.running == 1  # the thread has not ended yet
            gate.open()
            settled(tiny_server)
        assert len(gate.steps) < 4
    finally:
        object.__setattr__(settings, "deadline", 600.0)
