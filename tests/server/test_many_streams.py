"""Many parallel streams: woken together, written straight to their sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.running_server import Running, connect, raw_post, running, settled
from unspool.lm import LanguageModel
from unspool.server.runtime.registry import ModelEntry
from unspool.server.runtime.texts import LoopWaker
from unspool.text.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from lib.models import VOCABULARY, NullLoaded, write_tokenizer

STREAMS, TOKENS = 64, 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("null")
    write_tokenizer(folder, VOCABULARY)
    tokenizer = Tokenizer.from_file(folder)
    loaded: Any = NullLoaded(0.002)
    with running([ModelEntry("null", lambda: LanguageModel(loaded, tokenizer), 1)]) as server:
        yield server


def ask(server: Running, **extra: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "hello"}
    return {"messages": [message], "max_tokens": TOKENS, "stream": True, **extra}


def test_every_stream_gets_all_of_its_tokens(server: Running) -> None:
    async def item(client: httpx.AsyncClient) -> tuple[str, int]:
        body = ask(server, stream_options={"include_usage": True})
        result = (await client.post("/v1/chat/completions", json=body)).text
        lines = [line[6:] for line in result.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        text = "".join(delta.get("content", "") for delta in deltas)
        return text, events[-1]["usage"]["completion_tokens"]

    async def all_of_them() -> list[tuple[str, int]]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(item(client) for _ in range(STREAMS)))

    for text, count in asyncio.run(all_of_them()):
        assert count == TOKENS and text.count(" w") == TOKENS
    settled(server)


def test_tokens_are_timed_for_the_metrics(server: Running) -> None:
    before = _counted(server)
    server.http.post("/v1/chat/completions", json=ask(server))
    assert _counted(server) - before == TOKENS - 1  # from one to the next
    text = server.http.get("/metrics").text
    assert "# TYPE unspool_time_per_token_seconds histogram" in text
    assert 'unspool_time_per_token_seconds_bucket{le="0.001",model="null"}' in text
    assert 'unspool_time_per_token_seconds_sum{model="null"}' in text


def _counted(server: Running) -> int:
    name = 'unspool_time_per_token_seconds_count{model="null"} '
    lines = server.http.get("/metrics").text.splitlines()
    return int(sum(float(line.removeprefix(name)) for line in lines if line.startswith(name)))


def raw(server: Running, version: bytes = b"1.1", **extra: Any) -> socket.socket:
    request = raw_post("/v1/chat/completions", ask(server, **extra))
    return connect(server, request.replace(b"HTTP/1.1", b"HTTP/" + version, 1))


def test_an_old_client_gets_the_body_without_chunks(server: Running) -> None:
    line, result = raw(server, b"1.0"), b""
    while piece := line.recv(65536):
        result += piece
    head, _, body = result.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n") and b"\r\n" not in body


def test_a_client_that_reads_late_still_gets_everything(server: Running) -> None:
    """More than a socket holds: the rest is kept until the client takes it."""
    with raw(server, max_tokens=800, n=8) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        time.sleep(0.3)
        result = b""
        while not result.endswith(b"0\r\n\r\n"):
            piece = line.recv(1 << 20)
            assert piece, "the connection ended early"
            result += piece
    assert result.count(b'"finish_reason":"length"') == 8 and b"data: [DONE]" in result
    settled(server)


def test_the_loop_is_woken_once_for_all_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[int, list[int]]:
        loop, done, woken = asyncio.get_running_loop(), list[int](), list[int]()
        wake = loop.call_soon_threadsafe

        def counted(*params: Any, **named: Any) -> Any:
            woken.append(1)
            return wake(*params, **named)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        waker = LoopWaker.for_running_loop()
        assert LoopWaker.for_running_loop() is waker
        thread = threading.Thread(
            target=lambda: [waker.schedule(lambda n=n: done.append(n)) for n in range(300)]
        )
        thread.start()
        thread.join()  # the loop has not looked meanwhile
        while len(done) < 300:
            await asyncio.sleep(0.001)
        waker.schedule(lambda: done.append(300))  # and again, behind a round
        while len(done) < 301:
            await asyncio.sleep(0.001)
        return len(woken), done

    count, done = asyncio.run(main())
    assert count <= 2 and done == list(range(301))


def test_one_reader_that_fails_holds_up_no_other() -> None:
    async def pair() -> tuple[list[str], list[Any]]:
        reply: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, message: reply.append(message))
        waker, received = LoopWaker.for_running_loop(), list[str]()

        def fails() -> None:
            raise ValueError("a reader's own fault")

        waker.schedule(fails)
        waker.schedule(lambda: received.append("same round"))
        await asyncio.sleep(0.05)
        waker.schedule(lambda: received.append("next round"))
        await asyncio.sleep(0.05)
        return received, reply

    received, reply = asyncio.run(pair())
    assert received == ["same round", "next round"]
    assert [type(message["exception"]) for message in reply] == [ValueError]
