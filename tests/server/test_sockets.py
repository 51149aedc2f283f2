"""The server's sockets under strain: clients that never read, and no file descriptors left."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from unspool.server.http import server as serving
from unspool.server.http.settings import ServerSettings
from unspool.server.http.sockets import bind_socket

PATIENCE = 60.0


class Endless:
    """An application that sends until its client has gone."""

    def __init__(self) -> None:
        self.sent, self.is_finished = 0, threading.Event()

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
            self.sent += 1
            await asyncio.sleep(0)
        self.is_finished.set()


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_never_reads_is_dropped(reads: bool):
    app, settings = Endless(), ServerSettings(port=0, write_seconds=0.2, drain=1.0)
    bound, ready = bind_socket(settings), threading.Event()

    def started(_: str) -> bool:
        ready.set()
        return True

    server = serving.Server(app, settings, on_stopping=lambda: None, on_started=started)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        with socket.create_connection(bound.getsockname(), timeout=PATIENCE) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if reads:  # a little now and then: slow, and still a client
                for _ in range(10):
                    assert client.recv(1 << 20)
                    assert not app.is_finished.wait(0.05)
            else:
                assert app.is_finished.wait(PATIENCE), "it still holds its place"
        assert app.is_finished.wait(PATIENCE)
    finally:
        server.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()


SCRIPT = """
import asyncio, resource, sys

from unspool.server.http import server as serving
from unspool.server.http.sockets import bind_socket
from unspool.server.http.logs import configure_logging
from unspool.server.http.settings import ServerSettings


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for _ in range(2):
            await send({"type": (await receive())["type"] + ".complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


def started(address):
    print(address, flush=True)
    return True


configure_logging("info", True)
settings = ServerSettings(port=0)
server = serving.Server(app, settings, on_stopping=lambda: None, on_started=started)
bound = bind_socket(settings)
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
asyncio.run(server.serve([bound]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of open files")
def test_without_file_descriptors_it_logs_once_and_recovers(tmp_path: Path):
    log = tmp_path / "log"
    with log.open("wb") as errors:
        command = [sys.executable, "-c", SCRIPT]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        host, port = url.removeprefix("http://").split(":")
        clients = [socket.create_connection((host, int(port)), PATIENCE) for _ in range(40)]
        until = time.monotonic() + PATIENCE
        while b"Too many open files" not in log.read_bytes():
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(1.5)  # accepting is tried again every second
        for client in clients:
            client.close()
        assert httpx.get(url, timeout=PATIENCE).text == "here"
    finally:
        process.terminate()
        process.wait(PATIENCE)
    assert log.read_bytes().count(b"Too many open files") == 1
    assert log.stat().st_size < 10_000
