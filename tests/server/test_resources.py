"""All resources of a request are released, at any moment that it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest

from helpers.running_server import Running, default_entry, running, settled
from unspool.server.app import create_app
from unspool.server.http import events
from unspool.server.http.settings import ServerSettings
from unspool.server.runtime.registry import ModelEntry, ModelRegistry
from unspool.server.tree.branch_json import branch_store

SHORT = {"prompt": ["tree"] * 64, "max_tokens": 1}


@pytest.fixture(scope="module")
def real(default_model: Path) -> Iterator[Running]:
    """The default model with little memory."""
    with running([default_entry(default_model, memory=64 << 20)]) as server:
        yield server


@pytest.fixture(scope="module")
def small(small_entry: ModelEntry) -> Iterator[Running]:
    with running([small_entry]) as server:
        yield server


def connected(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def posted(path: str, body: bytes, length: int | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


# -- clients that hang up --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_hang_up_at_any_moment(small: Running, stream: bool):
    """All 64 places are taken each time; one that was lost would stop the server for good."""
    body = json.dumps({**SHORT, "stream": stream}).encode()
    for milliseconds in range(5, 105, 5):
        closed = connected(small)
        closed.sendall(posted("/v1/completions", body))
        time.sleep(milliseconds / 1000)
        closed.close()
    answer = httpx.post(f"{small.url}/v1/completions", json=SHORT, timeout=60)
    assert len(answer.json()["choices"]) == 64
    settled(small)


def test_a_text_that_cannot_be_started_takes_nothing_with_it(real: Running):
    body = {"prompt": ["hi", "word " * 3500], "max_tokens": 1}
    for _ in range(3):
        answer = httpx.post(f"{real.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code in (400, 503) and "memory" in answer.text
    settled(real)


# -- cancelled at every await ----------------------------------------------------------------


class Interrupted(Coroutine[Any, Any, None]):
    """A coroutine whose task is cancelled when it waits for the nth time: as soon as it waits, or
    (`late`) when what it waits for has come, but before it is told so."""

    def __init__(self, work: Coroutine[Any, Any, None], number: int, late: bool) -> None:
        self.work, self.left, self.late = work, number, late

    def send(self, value: Any) -> Any:
        return self._waits(self.work.send(value))

    def throw(
        self,
        kind: Any,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        return self._waits(self.work.throw(kind if value is None else value))

    def _waits(self, future: Any) -> Any:
        self.left -= 1
        task = asyncio.current_task()
        if self.left == 0 and task is not None:
            if self.late and future is not None:
                future.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        return future

    def close(self) -> None:
        self.work.close()

    def __await__(self) -> Any:
        raise NotImplementedError


def scope_of(path: str, method: str) -> dict[str, Any]:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": headers, "client": ("127.0.0.1", 1)}  # fmt: skip


async def interrupted(
    app: Any, path: str, body: Any, number: int, late: bool, method: str = "POST"
) -> bool:
    """Send a request and cancel it at its nth await; False if it was finished before that."""
    received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    messages: list[Any] = []

    async def receive() -> Any:
        if received:
            return received.pop()
        return await asyncio.Event().wait()  # stays for ever

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        messages.append(message)

    work = Interrupted(app(scope_of(path, method), receive, send), number, late)
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait_for(asyncio.shield(task), 60)
    except asyncio.CancelledError:
        return True
    assert messages[0]["status"] == 200, messages
    return work.left <= 0


CHAT = {"messages": [{"role": "user", "content": "the tree"}], "max_tokens": 3}
WORK: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["the", "tree", "rows"], "max_tokens": 2, "n": 2}),
    ("/v1/completions", {"prompt": "the tree", "max_tokens": 2, "echo": True, "logprobs": 1,
                         "stream": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2}),
    ("/v1/responses", {"input": "the tree", "max_output_tokens": 3, "stream": True}),
    ("/v1/messages", {**CHAT, "stream": True}),
    ("/v1/embeddings", {"input": ["the", "tree"]}),
    ("/v1/tree/{branch}/resume", {"max_tokens": 3, "stream": True}),
    ("/v1/tree/{branch}/resume", {"max_tokens": 3, "n": 2}),
]  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("path", "body"), WORK)
def test_a_request_may_be_cancelled_at_every_await(
    small_entry: ModelEntry, path: str, body: dict[str, Any], late: bool
):
    asyncio.run(_cancel_everywhere(small_entry, path, body, late))


async def _cancel_everywhere(
    entry: ModelEntry, path: str, body: dict[str, Any], late: bool
) -> None:
    registry = ModelRegistry([entry], model_memory=1 << 33)
    app, state = create_app(ServerSettings(max_running=8, max_queued=1), registry)
    async with registry.use(None) as served:
        state.ready = True
        await interrupted(app, "/v1/tree", {"prompt": "the tree"}, 10**9, late)
        (branch,) = branch_store(state).all
        number, was_cancelled = 0, True
        while was_cancelled:
            number += 1
            before = set(asyncio.all_tasks())
            filled = path.format(branch=branch)
            was_cancelled = await interrupted(app, filled, body, number, late)
            assert state.admission.queued == 0
            assert served.users == 1
            until = time.monotonic() + 20
            engine = served.lm.engine
            # A place is free when the thread that works for it has ended.
            while state.admission.running or engine.scheduler.tasks() or engine._waiting:
                assert time.monotonic() < until, f"a text is left running (await {number})"
                await asyncio.sleep(0.002)
            while extra := asyncio.all_tasks() - before:
                assert time.monotonic() < until, f"tasks are left running (await {number}): {extra}"
                await asyncio.sleep(0.002)
            assert branch_store(state).all[branch].writing is None
            for other in [b for b in branch_store(state).all.values() if b.id != branch]:
                assert other.writing is None
                branch_store(state).delete(other)
        assert number > 4
    await registry.close_all()


@pytest.mark.parametrize("late", [False, True])
def test_a_watcher_may_be_cancelled_at_every_await(
    small_entry: ModelEntry, late: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("unspool.server.tree.writing._POLL_SECONDS", 0.05)

    async def check() -> None:
        registry = ModelRegistry([small_entry], model_memory=1 << 33)
        app, state = create_app(ServerSettings(), registry)
        await interrupted(app, "/v1/tree", {"prompt": "the tree"}, 10**9, late)
        (branch,) = branch_store(state).all
        for number in range(1, 6):
            path = f"/v1/tree/{branch}/events"
            assert await interrupted(app, path, None, number, late, "GET")
            assert state.num_watchers == 0
        await registry.close_all()

    asyncio.run(check())


def test_who_waits_in_line_may_be_cancelled_at_every_await(small_entry: ModelEntry):
    async def check() -> None:
        registry = ModelRegistry([small_entry], model_memory=1 << 33)
        app, state = create_app(ServerSettings(max_running=2, max_queued=8), registry)
        body = {"prompt": ["the", "tree"], "max_tokens": 2}
        for late in (False, True):
            number, was_cancelled = 0, True
            while was_cancelled:
                number += 1
                first = asyncio.ensure_future(
                    interrupted(app, "/v1/completions", body, 10**9, late)
                )
                await asyncio.sleep(0)
                was_cancelled = await interrupted(app, "/v1/completions", body, number, late)
                await asyncio.wait_for(first, 60)
                assert state.admission.queued == 0
                async with asyncio.timeout(20):  # until the threads have ended
                    while state.admission.running:
                        await asyncio.sleep(0.002)
        await registry.close_all()

    asyncio.run(check())


# -- whether the server can still answer ------------------------------------------------------


def test_ready_says_no_when_the_engine_has_stopped(small_entry: ModelEntry):
    with running([small_entry]) as server:
        assert httpx.get(f"{server.url}/ready").status_code == 200
        server.state.registry.loaded[server.model].lm.engine.close()
        answer = httpx.get(f"{server.url}/ready")
        assert answer.status_code == 503 and "stopped" in answer.json()["error"]["message"]
        late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=20)
        assert late.status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.state.admission.running == 0


# -- sockets ----------------------------------------------------------------------------------


def closed_by_server(sockets: list[socket.socket], seconds: float) -> int:
    """How many the server hangs up on."""
    until, result = time.monotonic() + seconds, 0
    for item in sockets:
        try:
            item.settimeout(max(0.1, until - time.monotonic()))
            while item.recv(4096):
                pass
            result += 1
        except TimeoutError:
            pass
        except ConnectionResetError:
            result += 1
        item.close()
    return result


def test_who_sends_half_a_body_is_hung_up_on(small_entry: ModelEntry):
    with running([small_entry], body_seconds=0.5, api_keys=("long-enough-key",)) as server:
        half = posted("/v1/completions", b'{"prompt": ', 1000)
        # Without a key they are answered (401) before the body has come, and must go as well.
        keyed = half.replace(b"\r\n", b"\r\nx-api-key: long-enough-key\r\n", 1)
        for data, status in ((keyed, b"408"), (half, b"401")):
            sockets = [connected(server) for _ in range(30)]
            for item in sockets:
                item.sendall(data)
            first = sockets[0].recv(4096)
            assert first.startswith(b"HTTP/1.1 " + status)
            for item in sockets:
                item.sendall(b" ")  # a little more, so that it does not look idle
            assert closed_by_server(sockets, 8) == 30


def test_who_sends_a_body_drop_by_drop_is_hung_up_on(small_entry: ModelEntry):
    """Each drop comes in time; all of it must."""
    with running([small_entry], body_seconds=0.5) as server, connected(server) as slow:
        slow.sendall(posted("/v1/completions", b"", 1000))
        until = time.monotonic() + 20
        with pytest.raises(OSError):
            while time.monotonic() < until:
                slow.sendall(b" ")
                time.sleep(0.1)


def test_who_begins_another_request_and_stops_is_hung_up_on(small_entry: ModelEntry):
    with running([small_entry], body_seconds=0.5) as server:
        complete = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

        def answered(item: socket.socket) -> bool:
            item.sendall(complete)
            result = b""
            while not result.endswith(b"}") and (extra := item.recv(4096)):
                result += extra
            return result.startswith(b"HTTP/1.1 200")

        # One after the other: who connects and does not ask in time is hung up on too.
        with contextlib.ExitStack() as holder:
            idle = holder.enter_context(connected(server))
            assert answered(idle)
            half = holder.enter_context(connected(server))
            assert answered(half)
            half.sendall(complete[:20])
            assert half.recv(4096) == b""
            assert answered(idle)  # one that is only kept open is still served


# -- long silences ----------------------------------------------------------------------------


def test_a_stream_shows_that_it_is_alive(real: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.02)
    body = {"prompt": "word " * 400, "max_tokens": 1, "stream": True, "echo": True, "logprobs": 0}
    with httpx.stream("POST", f"{real.url}/v1/completions", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[0].startswith(": ")  # while the prompt is read
    assert all(line.startswith((": ", "data: ")) for line in lines) and lines[-1] == "data: [DONE]"


# -- memory -----------------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _round(server: Running, number: int, streams: int) -> None:
    """Streams of which every tenth is cancelled; no two prompts are alike."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

        async def item(index: int) -> None:
            body = {"prompt": f"Round {number}, text {index}: once upon a time " + "word " * 40,
                    "max_tokens": 16, "stream": True}  # fmt: skip
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    if index % 10 == 0:
                        return

        await asyncio.gather(*map(item, range(streams)))


@pytest.mark.slow
def test_memory_stays_flat_over_ten_rounds_of_cancelled_streams(real: Running):
    measured: list[int] = []
    for number in range(10):
        asyncio.run(_round(real, number, 100))
        settled(real, 60)
        measured.append(resident_bytes())
    # It grows at first, as the cache fills and each thread gets its working memory; then no more.
    assert max(measured[5:]) - max(measured[:5]) < 48 << 20, measured
