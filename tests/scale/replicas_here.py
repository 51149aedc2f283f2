"""Servers and a gateway in threads of this process, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from running_server import Running, running

from unspool.scale.replicas.asking import Asked
from unspool.scale.replicas.gateway import Gateway, create_gateway
from unspool.scale.replicas.listening import ServerThread
from unspool.scale.replicas.pool import Pool, Target
from unspool.scale.replicas.request_router import PolicyRouter
from unspool.serve.core.registry import ModelEntry
from unspool.serve.http.settings import ServeSettings


@dataclass
class Chooser:
    """Knows replicas as Ray does, and decides with the same policy."""

    addresses: dict[str, str]
    policy: PolicyRouter = field(default_factory=PolicyRouter)

    async def choose(self, asked: Asked) -> Target:
        while not self.addresses:  # as Ray's router waits for the first
            await asyncio.sleep(0.01)
        self.policy.update(self.addresses)
        asked.replicas = dict(self.addresses)
        name = self.policy.choose(asked)
        return Target(name, self.addresses[name])


@dataclass
class Front:
    """A gateway that listens."""

    url: str
    gateway: Gateway
    chooser: Chooser

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


@contextlib.contextmanager
def front(addresses: dict[str, str], wait: float = 5.0, **settings: Any) -> Iterator[Front]:
    """A gateway in a thread, in front of these."""
    chooser = Chooser(dict(addresses))
    wanted = ServeSettings(port=0, drain=2.0, **settings)
    app, gateway = create_gateway(wanted, Pool(chooser, wait))
    server = ServerThread(app, wanted, "127.0.0.1", lambda: None)
    try:
        yield Front(f"http://{server.address}", gateway, chooser)
    finally:
        server.stop()


@contextlib.contextmanager
def replica(model: Path, name: str, **settings: Any) -> Iterator[Running]:
    """A server that is called a replica."""
    import unspool

    entry = ModelEntry("tiny", lambda: unspool.load(model, memory=8 << 20, threads=1), 1 << 20)
    with running([entry], replica=name, **settings) as found:
        yield found


def address(server: Running) -> str:
    return server.url.removeprefix("http://")


@contextlib.contextmanager
def broken_replica(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Reads a request, says what `answer` sends, and hangs up: a replica that dies just then."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listening.accept()
                with line:
                    line.recv(1 << 16)
                    answer(line)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield "{}:{}".format(*listening.getsockname())
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
