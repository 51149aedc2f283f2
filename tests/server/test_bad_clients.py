"""Clients that leave, stall, flood or lie: everything is released, and no other request suffers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import httpx
import pytest

from helpers.running_server import (
    Running,
    connect,
    default_entry,
    raw_post,
    running,
    settled,
    wait_until,
)
from unspool.server.app import create_app
from unspool.server.http import events
from unspool.server.http import server as serving
from unspool.server.http.settings import ServerSettings
from unspool.server.http.sockets import bind_socket
from unspool.server.runtime.registry import ModelEntry, ModelRegistry
from unspool.server.tree.branch_json import branch_store

PROMPT = "Once upon a time"
# Never ends by itself: the oldest tokens are forgotten when the context is full.
LONG = {"prompt": PROMPT, "max_tokens": 10**6, "unspool": {"end": False, "endless": True},
        "stream": True}  # fmt: skip
PATH = "/v1/completions"
KEY = "long-enough-key"
JSON = {"content-type": "application/json"}


def body_of(**params: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 16, "seed": 1, **params}


def completed(server: Running, **params: Any) -> httpx.Response:
    return server.http.post(PATH, json=body_of(**params))


@pytest.fixture(scope="module")
def small(small_entry: ModelEntry) -> Iterator[Running]:
    with running([small_entry]) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(small_entry: ModelEntry) -> Iterator[Running]:
    """A server with keys that closes a connection after half a second without the request."""
    keys = (KEY, "second-secret-key")
    with running(
        [small_entry], body_seconds=0.5, api_keys=keys, cors=("https://page.example",)
    ) as server:
        yield server


# -- clients that leave ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_hang_up_at_any_moment(small: Running, stream: bool):
    """All 64 places are taken each time; a lost one would stop the server for good."""
    body = {"prompt": ["tree"] * 64, "max_tokens": 1}
    for milliseconds in (1, 5, 15, 40, 100):
        client = connect(small, raw_post(PATH, {**body, "stream": stream}))
        time.sleep(milliseconds / 1000)
        client.close()
    assert len(completed(small, **body).json()["choices"]) == 64
    settled(small)


class Crowd:
    """Clients that vanish at random moments, and others that wait for their texts."""

    def __init__(self, server: Running, seed: int) -> None:
        self.server, self.rng = server, random.Random(seed)
        lm = server.state.registry.loaded[server.model].lm
        self.texts = {n: lm.generate(PROMPT, seed=n, max_tokens=16).text for n in range(8)}

    async def visit(self, vanishing: int, staying: int, parallel: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        url, places = self.server.url, asyncio.Semaphore(parallel)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            work = [self._vanish(client, places) for _ in range(vanishing)]
            work += [self._stay(client, places, number % 8) for number in range(staying)]
            self.rng.shuffle(work)
            await asyncio.gather(*work)

    async def _vanish(self, client: httpx.AsyncClient, places: asyncio.Semaphore) -> None:
        rng = self.rng
        body = body_of(max_tokens=200, stream=rng.random() < 0.7, n=rng.choice((1, 1, 3)))
        async with places:
            with contextlib.suppress(TimeoutError):
                moment = rng.choice((0.002, 0.02, 0.2)) * rng.random()
                await asyncio.wait_for(client.post(PATH, json=body), moment)

    async def _stay(self, client: httpx.AsyncClient, places: asyncio.Semaphore, seed: int) -> None:
        async with places:
            answer = await client.post(PATH, json=body_of(seed=seed))
            assert answer.json()["choices"][0]["text"] == self.texts[seed]


def test_many_vanish_and_those_who_stay_get_their_texts(small: Running):
    asyncio.run(Crowd(small, seed=3).visit(vanishing=30, staying=8, parallel=38))
    settled(small)


@pytest.mark.slow
def test_five_hundred_vanish_and_memory_stays_flat(real_server: Running):
    """With slow readers and half-open connections among them, which never take part."""
    silent = [connect(real_server, raw_post(PATH, LONG)) for _ in range(4)]
    half = [connect(real_server, b"POST /v1/completions HTTP/1.1\r\nHost: loc") for _ in range(20)]
    crowd = Crowd(real_server, seed=5)
    resident: list[int] = []
    for _ in range(5):
        asyncio.run(crowd.visit(vanishing=100, staying=16, parallel=50))
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
    for client in (*silent, *half):
        client.close()
    settled(real_server)
    assert (max(resident[1:]) - resident[0]) * os.sysconf("SC_PAGE_SIZE") < 32 << 20, resident


def test_a_text_that_cannot_be_started_takes_nothing_with_it(small_model: Path):
    entry = default_entry(small_model, memory=1 << 16, threads=1)
    with running([entry]) as server:
        for _ in range(3):
            answer = completed(server, prompt=["hi", "word " * 90])
            assert answer.status_code in (400, 503) and "memory" in answer.text
        settled(server)


def test_waiting_in_the_queue(small_entry: ModelEntry):
    """Two may wait; who leaves the queue is forgotten, who runs out of time gets an error."""
    with running([small_entry], max_running=1, max_queued=2) as server:
        first = connect(server, raw_post(PATH, LONG))
        first.recv(100)
        waiting = [connect(server, raw_post(PATH, LONG)) for _ in range(2)]
        admission = server.state.admission
        wait_until(lambda: admission.queued == 2)
        full = completed(server)
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["code"] == "queue_full"
        for client in waiting:
            client.close()
        wait_until(lambda: admission.queued == 0)
        usual = server.state.settings
        server.state.settings = replace(usual, deadline=0.1)  # for requests from now on
        assert completed(server).status_code == 504
        server.state.settings = usual
        first.close()
        assert completed(server).status_code == 200
        several = completed(server, prompt=["a", "b", "c"])
        assert len(several.json()["choices"]) == 3  # one after the other
        assert completed(server, n=2).status_code == 400
        settled(server)


def test_deadlines_and_slow_readers(small_entry: ModelEntry):
    with running([small_entry], deadline=0.2) as server:
        late = completed(server, **{**LONG, "stream": False})
        assert late.status_code == 504 and late.json()["error"]["type"] == "timeout_error"
        last = completed(server, **LONG).text.strip().split("\n\n")[-1]
        assert "timed out" in json.loads(last.removeprefix("data: "))["error"]["message"]
        with connect(server, raw_post(PATH, {**LONG, "max_tokens": 2000})):  # it never reads
            wait_until(lambda: server.state.admission.running)
            server.state.settings = replace(server.state.settings, deadline=20.0)
            assert completed(server).status_code == 200
            settled(server)


# -- requests cancelled at every await -------------------------------------------------------


class Interrupted(Coroutine[Any, Any, None]):
    """A coroutine whose task is cancelled when it waits for the nth time: as soon as it waits, or
    (`late`) when the awaited future is done, but before the task wakes up."""

    def __init__(self, work: Coroutine[Any, Any, None], number: int, late: bool) -> None:
        self.work, self.remaining, self.late = work, number, late

    def send(self, value: Any) -> Any:
        return self._count(self.work.send(value))

    def throw(
        self, kind: Any, value: BaseException | object = None, trace: TracebackType | None = None
    ) -> Any:
        return self._count(self.work.throw(kind if value is None else value))

    def _count(self, future: Any) -> Any:
        self.remaining -= 1
        task = asyncio.current_task()
        if self.remaining == 0 and task is not None:
            if self.late and future is not None:
                future.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        return future

    def close(self) -> None:
        self.work.close()

    def __await__(self) -> Any:
        raise NotImplementedError


async def interrupted(
    app: Any, path: str, body: Any, number: int = 10**9, late: bool = False, method: str = "POST"
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

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
             "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
             "root_path": "", "headers": headers, "client": ("127.0.0.1", 1)}  # fmt: skip
    work = Interrupted(app(scope, receive, send), number, late)
    try:
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(work)), 60)
    except asyncio.CancelledError:
        return True
    assert messages[0]["status"] == 200, messages
    return work.remaining <= 0


CHAT = {"messages": [{"role": "user", "content": "the tree"}], "max_tokens": 2}
WORK: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"prompt": ["the", "tree"], "max_tokens": 2, "n": 2}),
    (PATH, {"prompt": "the", "max_tokens": 2, "echo": True, "logprobs": 1, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2}),
    ("/v1/responses", {"input": "the tree", "max_output_tokens": 2, "stream": True}),
    ("/v1/messages", {**CHAT, "stream": True}),
    ("/v1/embeddings", {"input": ["the", "tree"]}),
    ("/v1/tree/{branch}/resume", {"max_tokens": 2, "stream": True}),
    ("/v1/tree/{branch}/resume", {"max_tokens": 2, "n": 2}),
]


@pytest.mark.parametrize("late", [False, True])
def test_requests_may_be_cancelled_at_every_await(small_entry, late, monkeypatch):
    monkeypatch.setattr("unspool.server.tree.writing._POLL_SECONDS", 0.05)

    async def check() -> None:
        registry = ModelRegistry([small_entry], model_memory=1 << 33)
        app, state = create_app(ServerSettings(max_running=8, max_queued=1), registry)
        async with registry.use(None) as served:
            state.ready = True
            await interrupted(app, "/v1/tree", {"prompt": "the tree"})
            for path, body in WORK:
                await _cancel_everywhere(app, state, served, path, body, late)
            branch, *_ = branch_store(state).all  # a cancelled request may have made one more
            for number in range(1, 6):  # a client that watches a branch
                path = f"/v1/tree/{branch}/events"
                assert await interrupted(app, path, None, number, late, "GET")
                assert state.num_watchers == 0
        await registry.close_all()

    asyncio.run(check())


async def _cancel_everywhere(
    app: Any, state: Any, served: Any, path: str, body: dict[str, Any], late: bool
) -> None:
    store, engine = branch_store(state), served.lm.engine
    (branch,) = store.all
    number, was_cancelled = 0, True
    while was_cancelled:
        number += 1
        before = set(asyncio.all_tasks())
        was_cancelled = await interrupted(app, path.format(branch=branch), body, number, late)
        assert state.admission.queued == 0 and served.users == 1
        async with asyncio.timeout(20):  # until the threads that work for it have ended
            while (
                state.admission.running
                or engine.scheduler.tasks()
                or engine._waiting
                or asyncio.all_tasks() - before
            ):
                await asyncio.sleep(0.001)
        for other in list(store.all.values()):
            assert other.writing is None
            if other.id != branch:
                store.delete(other)
    assert number > 4


@pytest.mark.parametrize("late", [False, True])
def test_requests_in_the_queue_may_be_cancelled_at_every_await(small_entry: ModelEntry, late: bool):
    async def check() -> None:
        registry = ModelRegistry([small_entry], model_memory=1 << 33)
        app, state = create_app(ServerSettings(max_running=2, max_queued=8), registry)
        body = {"prompt": ["the", "tree"], "max_tokens": 2}
        number, was_cancelled = 0, True
        while was_cancelled:
            number += 1
            first = asyncio.ensure_future(interrupted(app, PATH, body))
            await asyncio.sleep(0)
            was_cancelled = await interrupted(app, PATH, body, number, late)
            await asyncio.wait_for(first, 60)
            assert state.admission.queued == 0
            async with asyncio.timeout(20):  # until the threads have ended
                while state.admission.running:
                    await asyncio.sleep(0.001)
        await registry.close_all()

    asyncio.run(check())


def test_ready_says_no_when_the_engine_has_stopped(small_entry: ModelEntry):
    with running([small_entry]) as server:
        assert server.http.get("/ready").status_code == 200
        server.state.registry.loaded[server.model].lm.engine.close()
        answer = server.http.get("/ready")
        assert answer.status_code == 503 and "stopped" in answer.json()["error"]["message"]
        assert completed(server).status_code == 503
        assert server.http.get("/health").status_code == 200
        assert server.state.admission.running == 0


# -- connections -----------------------------------------------------------------------------


def read_all(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(4096):
            content += piece
    return content


def test_half_a_request_is_hung_up_on(impatient: Running):
    half = raw_post(PATH, b'{"prompt": ', f"x-api-key: {KEY}", length=1000)
    # Without a key the answer (401) comes before the body does; the connection ends as well.
    cases = [(half, b"408"), (half.replace(KEY.encode(), b"wrong"), b"401"), (half[:30], b"")]
    for data, status in cases:
        clients = [connect(impatient, data) for _ in range(4)]
        for client in clients:
            if status:
                with contextlib.suppress(OSError):
                    client.sendall(b" ")  # so that it does not look idle
            assert read_all(client).startswith(b"HTTP/1.1 " + status if status else b"")
            client.close()


def test_a_body_sent_drop_by_drop_is_hung_up_on(impatient: Running):
    """Each drop comes in time; the whole body does not."""
    with connect(impatient, raw_post(PATH, b"", f"x-api-key: {KEY}", length=1000)) as slow:
        end = time.monotonic() + 20
        with pytest.raises(OSError):
            while time.monotonic() < end:
                slow.sendall(b" ")
                time.sleep(0.1)


def test_a_second_request_that_stops_half_way_is_hung_up_on(impatient: Running):
    complete = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def is_answered(client: socket.socket) -> bool:
        client.sendall(complete)
        result = b""
        while not result.endswith(b"}") and (piece := client.recv(4096)):
            result += piece
        return result.startswith(b"HTTP/1.1 200")

    # One after the other: a client that connects and does not ask in time is hung up on too.
    with connect(impatient) as idle:
        assert is_answered(idle)
        with connect(impatient) as half:
            assert is_answered(half)
            half.sendall(complete[:20])
            assert half.recv(4096) == b""
        assert is_answered(idle)  # a connection that is only kept open is still served


def test_a_stream_shows_that_it_is_alive(small: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.001)
    backend = small.state.registry.loaded["small"].lm.engine.backend
    launch = backend.launch

    def launch_slowly(batch: Any) -> Any:
        time.sleep(0.05)
        return launch(batch)

    monkeypatch.setattr(backend, "launch", launch_slowly)
    params = {"max_tokens": 1, "echo": True, "logprobs": 0, "stream": True}
    lines = [line for line in completed(small, **params).text.splitlines() if line]
    assert lines[0].startswith(": ")  # while the prompt is read
    assert all(line.startswith((": ", "data: ")) for line in lines) and lines[-1] == "data: [DONE]"


class Endless:
    """An application that sends until its client has gone."""

    def __init__(self) -> None:
        self.is_finished = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": (await receive())["type"] + ".complete"})
            return
        await receive()
        closed = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = {"type": "http.response.body", "body": b"x" * 65536, "more_body": True}
        while not closed.done():
            await send(body)
            await asyncio.sleep(0)
        self.is_finished.set()


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_never_reads_is_dropped(reads: bool):
    app = Endless()
    with running([], app=app, write_seconds=0.2, drain=1.0) as server:
        with connect(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
            if reads:  # a little now and then: slow, and still a client
                for _ in range(6):
                    assert client.recv(1 << 20)
                    assert not app.is_finished.wait(0.05)
            else:
                assert app.is_finished.wait(60), "it still holds its place"
        assert app.is_finished.wait(60)


def test_without_file_descriptors_it_pauses_logs_once_and_recovers(monkeypatch):
    error = OSError(errno.EMFILE, "Too many open files")

    def fail() -> None:
        raise error

    settings, log, others = ServerSettings(port=0), [], []
    with bind_socket(settings) as bound:
        bound.listen()
        with monkeypatch.context() as patch:
            patch.setattr(bound, "_accept", fail)
            with pytest.raises(OSError, match="Too many open files"):
                bound.accept()
        with pytest.raises(BlockingIOError):  # not tried again for a while
            bound.accept()
        with socket.create_connection(bound.getsockname()) as client:
            bound._paused_until = 0.0  # the pause is over
            assert bound.accept()[1] == client.getsockname()
    monkeypatch.setattr(serving, "log_event", lambda *event, **fields: log.append(fields))
    server = serving.Server(Endless(), settings, on_stopping=print, on_started=bool)
    loop = SimpleNamespace(time=lambda: 5.0, default_exception_handler=others.append)
    for exception in (error, error, ValueError()):
        server._on_loop_error(loop, {"message": "", "exception": exception})
    assert [fields["error"] for fields in log] == [str(error)] and len(others) == 1


# -- requests that are not what they should be -----------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body"),
        (b"{", "not JSON"),
        (b"null", "JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": 1e999}', "is too large"),
        (b'{"prompt": "a", "max_tokens": 1e30}', "max_tokens"),
        (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "seed"),
        (b'{"prompt": "a", "seed": ' + b"9" * 9000 + b"}", "not JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (b'{"prompt": "half \\ud800 a character"}', ""),
        (b'{"prompt": "a", "unspool": {"regex": "("}}', "regex"),
        (b'{"prompt": "a", "unspool": {"regex": "\\ud800"}}', "surrogate"),
        (b'{"prompt": "a", "unspool": {"regex": "(((a{1,99}){1,99}){1,99}){1,99}"}}', "regex"),
        (b'{"prompt": "a", "unspool": {"guard": "pattern=(?=a)b"}}', "look-around"),
        (b'{"prompt": "a", "unspool": {"grammar": "root ::= root root"}}', ""),
        (b'{"prompt": "a", "unspool": {"json_schema": {"$ref": "file:///etc/passwd"}}}', ""),
        (b'{"prompt": "a", "unspool": {"json_schema": {"$ref": "http://127.0.0.1:1/x"}}}', ""),
        (b'{"prompt": "a", "chat_template": "{{ 1 }}"}', "chat_template"),
        (b'{"prompt": "a", "model": "../../etc/passwd"}', "no such model"),
        (b'{"prompt": "a", "unspool": {"guard": "ban=' + b"a|" * 9000 + b'"}}', "guard"),
        (b'{"prompt": "a", "unspool": {"dry_breakers": [[1e30]], "dry_multiplier": 1}}', "dry"),
        (
            json.dumps({"prompt": "a", "logit_bias": dict.fromkeys(range(2000), 1)}).encode(),
            "at most 1024",
        ),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
def test_bad_bodies_get_a_clear_answer(small: Running, body: bytes, words: str):
    answer = small.http.post(PATH, content=body, headers=JSON)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert words in error["message"] and set(error) == {"message", "type", "param", "code"}
    assert error["type"] in ("invalid_request_error", "not_found_error")


TURN = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(("path", "body", "message"), [
    ("/v1/rerank", {"query": "", "documents": ["a"]},
     "query must have at least 1 character, got 0"),
    ("/v1/rerank", {"query": "a", "documents": [5]},
     "documents.0 must be a string or an object, got 5"),
    ("/v1/completions", {"prompt": "x", "max_tokens": -5}, "max_tokens must be >= 0, got -5"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1.5},
     "max_tokens must be an integer, got 1.5"),
    ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs must be <= 20, got 21"),
    ("/v1/completions", {"prompt": 5}, "prompt must be a string or a list, got 5"),
    ("/v1/completions", {"prompt": ["a", 5]}, "prompt: all items must be of one kind: strings, "
     "token ids, or lists of token ids"),
    ("/v1/completions", {"prompt": []}, "prompt must have at least 1 item, got 0"),
    ("/v1/completions", {"prompt": "x", "unspool": {"speculate": "x"}},
     "unspool.speculate must be 'lookup' or 'mtp', got 'x'"),
    ("/v1/chat/completions", {"messages": [{"role": "bard", "content": "x"}]},
     "messages.0.role must be 'system', 'developer', 'user', 'assistant' or 'tool', got 'bard'"),
    ("/v1/messages", {"messages": TURN, "max_tokens": -5}, "max_tokens must be >= 1, got -5"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0},
     "max_output_tokens must be >= 1, got 0"),
    ("/v1/embeddings", {"input": None}, "input must be a string or a list, got null"),
    ("/api/generate", {"prompt": "x", "options": {"num_predict": -5}},
     "max_tokens must be >= 0, got -5"),
    ("/completion", {"prompt": "x", "n_probs": -1}, "n_probs must be >= 0, got -1"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0 must be >= 0, got -1"),
])  # fmt: skip
def test_errors_name_the_field_and_its_range(small: Running, path: str, body: Any, message: str):
    answer = small.http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error if isinstance(error, str) else error["message"]) == message
    settled(small)


def test_every_endpoint_names_the_field_that_is_wrong(small: Running):
    """No message of the validator reaches a client without the field and what it must be."""
    document = small.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    num_checked = 0
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        schema = schemas.get(reference.rpartition("/")[2], {})
        for name, field in schema.get("properties", {}).items():
            kinds = {part.get("type") for part in field.get("anyOf", [field])}
            if "{" not in path and kinds <= {"integer", "null"} and "integer" in kinds:
                answer = small.http.post(path, json={name: "many"})
                assert answer.status_code == 400, (path, name)
                reply = answer.json()
                error = reply["detail"]["msg"] if "detail" in reply else reply["error"]  # KoboldAI
                text = error if isinstance(error, str) else error["message"]
                assert " must " in text or " is missing; " in text, (path, text)
                num_checked += 1
    assert num_checked > 50


def test_bodies_that_are_too_large(small: Running):
    large = small.http.post(PATH, content=b" " * (5 << 20), headers=JSON)
    assert large.status_code == 413
    pieces = (b" " * 100_000 for _ in range(50))
    with contextlib.suppress(httpx.WriteError):  # it may hang up in the middle
        chunked = small.http.post(PATH, content=pieces, headers=JSON)
        assert chunked.status_code == 413


def test_explosive_schemas_block_no_other_request(server: Running):
    """While schemas that are hard to compile come in, a stream's tokens keep flowing."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(8):
        deep = {"anyOf": [{"type": "object", "properties": {"a": deep, "b": deep}}, deep]}
    wide = {
        f"p{i}": {"type": "string", "pattern": f"^(a|b|ab){{{i},{i + 90}}}$"} for i in range(60)
    }
    schemas = [deep, {"type": "object", "properties": wide, "required": [*wide]},
               {"enum": [f"{i}" * 50 for i in range(500)]}]  # fmt: skip
    statuses: list[int] = []

    def attack() -> None:
        for schema in schemas:
            answer = completed(server, max_tokens=4, unspool={"json_schema": schema})
            statuses.append(answer.status_code)

    thread = threading.Thread(target=attack)
    tokens = 0
    with server.http.stream("POST", PATH, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        thread.start()
        for line in lines:
            tokens += bool(line)
            if not thread.is_alive():
                break
    thread.join()
    assert all(status in (200, 400) for status in statuses) and len(statuses) == 3
    assert tokens > 10
    settled(server)


def test_templates_cannot_be_attacked_through_messages(small: Running):
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}{% endfor %}"
    body = {"messages": [{"role": "user", "content": attack}]}
    assert attack in small.http.post("/apply-template", json=body).json()["prompt"]


# -- who may ask -----------------------------------------------------------------------------


def test_keys_and_origins(impatient: Running):
    http, body = impatient.http, body_of(max_tokens=1)
    for headers in ({}, {"authorization": "Bearer wrong-key-here"}, {"x-api-key": ""},
                    {"authorization": f"Bearer {KEY[:-1]}"}):  # fmt: skip
        refused = http.post(PATH, json=body, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": "second-secret-key"}):
        assert http.post(PATH, json=body, headers=headers).status_code == 200
    assert http.get("/metrics").status_code == 401
    assert http.get("/health").status_code == 200
    asks = {"origin": "https://page.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    allowed = http.options(PATH, headers=asks)
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    other = http.options(PATH, headers={**asks, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_server_without_a_key_answers_only_to_its_own_name(small: Running):
    evil = small.http.get("/v1/models", headers={"host": "evil.example"})
    assert evil.status_code == 403 and "localhost" in evil.json()["error"]["message"]
    assert small.http.get("/v1/models", headers={"host": "localhost:1234"}).status_code == 200
    origin = small.http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in origin.headers


# -- several models --------------------------------------------------------------------------


def test_who_leaves_while_a_model_is_loaded_does_not_stop_it(small_entry: ModelEntry):
    loads, may_load = threading.Semaphore(0), threading.Event()

    def load_slowly() -> Any:
        loads.release()
        assert may_load.wait(60)
        return small_entry.load()

    with running([small_entry, ModelEntry("two", load_slowly, 1000)]) as server:
        client = connect(server, raw_post(PATH, body_of(model="two")))
        assert loads.acquire(timeout=60)
        client.close()
        may_load.set()
        assert completed(server, model="two").status_code == 200
        assert not loads.acquire(blocking=False)  # loaded once
        assert server.state.registry.loaded["two"].users == 0 == server.state.admission.running


def test_models_are_loaded_when_asked_for_and_make_room(small_entry: ModelEntry):
    entries = [replace(small_entry, name=name) for name in ("one", "two")]
    with running(entries, room=int(small_entry.size * 1.5)) as server:
        registry = server.state.registry
        assert [*registry.loaded] == ["one"]
        first = completed(server).json()
        assert first["model"] == "one"
        body = {**LONG, "max_tokens": 300}
        with (
            server.http.stream("POST", PATH, json=body) as busy,
            ThreadPoolExecutor(1) as threads,
        ):
            lines = busy.iter_lines()
            next(lines)
            # The other model must wait until this text is finished; it is never closed under it.
            other = threads.submit(completed, server, model="two")
            assert [line for line in lines if line][-1] == "data: [DONE]"
            answer = other.result(60).json()
        assert answer["choices"] == first["choices"] and answer["model"] == "two"
        assert [*registry.loaded] == ["two"]
        assert completed(server).json()["choices"] == first["choices"]
        assert [*registry.loaded] == ["one"]
        models = server.http.get("/v1/models").json()["data"]
        assert {m["id"]: m["unspool"]["loaded"] for m in models} == {"one": True, "two": False}
