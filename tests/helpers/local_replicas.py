"""Servers and a gateway in threads of this process, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from helpers.running_server import Running, running
from unspool.scale.replicas.gateway import Gateway, ReplicaPool, Target, create_gateway
from unspool.scale.replicas.routing import RouteHints
from unspool.server.http.settings import ServerSettings
from unspool.server.runtime.registry import ModelEntry


@dataclass
class Chooser:
    """Chooses with Ray's routing policy, without Ray."""

    addresses: dict[str, str]
    policy: Any

    async def choose(self, hints: RouteHints) -> Target:
        while not self.addresses:  # Ray's router waits for the first replica too
            await asyncio.sleep(0.01)
        self.policy.update(self.addresses)
        hints.replicas = dict(self.addresses)
        name = self.policy.choose(hints)
        return Target(name, self.addresses[name])


@dataclass
class Front:
    """A running gateway."""

    url: str
    gateway: Gateway
    chooser: Chooser

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


@contextlib.contextmanager
def front(addresses: dict[str, str], wait: float = 5.0, **settings: Any) -> Iterator[Front]:
    """Run a gateway in a thread."""
    from unspool.scale.replicas.application import ServerThread  # imports Ray: seconds
    from unspool.scale.replicas.request_router import PolicyRouter

    chooser = Chooser(dict(addresses), PolicyRouter())
    serve_settings = ServerSettings(port=0, drain=2.0, **settings)
    app, gateway = create_gateway(serve_settings, ReplicaPool(chooser, wait))
    server = ServerThread(app, serve_settings, "127.0.0.1", lambda: None)
    try:
        yield Front(f"http://{server.address}", gateway, chooser)
    finally:
        server.stop()


@contextlib.contextmanager
def replica(model: Path, name: str, **settings: Any) -> Iterator[Running]:
    """Run a server as a replica in this process."""
    import unspool

    entry = ModelEntry("tiny", lambda: unspool.load(model, memory=8 << 20, threads=1), 1 << 20)
    with running([entry], replica=name, **settings) as server:
        yield server


def address(server: Running) -> str:
    return server.url.removeprefix("http://")


@contextlib.contextmanager
def broken_replica(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a replica that reads a request, sends what `answer` sends, and disconnects."""
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
