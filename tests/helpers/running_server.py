"""A running server in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unspool.server.app import create_app
from unspool.server.http import server as serving
from unspool.server.http.settings import ServerSettings
from unspool.server.http.sockets import bind_socket
from unspool.server.runtime.registry import ModelEntry, ModelRegistry
from unspool.server.runtime.state import ServerState


@dataclass
class Running:
    """A server that listens."""

    url: str
    state: ServerState
    stop: Any

    @property
    def model(self) -> str:
        return self.state.registry.first

    @property
    def pool(self) -> Any:
        """The pages of the first model."""
        return self.state.registry.loaded[self.model].lm.engine.tree.pool


def settled(server: Running, seconds: float = 60.0) -> None:
    """Wait until nothing runs and nothing is held; every page is free then, but for what is cached
    to be reused."""
    registry = server.state.registry
    lm = registry.loaded[server.model].lm
    until = time.monotonic() + seconds
    while (
        server.state.admission.running
        or any(served.users for served in registry.loaded.values())
        or len(lm.engine.scheduler)
    ):
        assert time.monotonic() < until, "something still runs"
        time.sleep(0.005)
    lm.engine.call(lambda: lm.engine.tree.index.clear())
    assert lm.engine.tree.pool.used == 0
    assert not lm.engine._waiting


@contextlib.contextmanager
def running(entries: list[ModelEntry], **settings: Any) -> Iterator[Running]:
    """A server in a thread of this process."""
    room, adapters = settings.pop("room", 1 << 33), settings.pop("adapters", None)
    expected = replace(ServerSettings(port=0, drain=2.0), **settings)
    bound = bind_socket(expected)
    app, state = create_app(expected, ModelRegistry(entries, model_memory=room, adapters=adapters))
    address: list[str] = []
    ready = threading.Event()

    def started(url: str) -> bool:
        address.append(url)
        ready.set()
        return True

    server = serving.Server(app, expected, on_stopping=lambda: None, on_started=started)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]

    def work() -> None:
        try:
            asyncio.run(server.serve([bound]))
        finally:
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(60) and address, "the server did not start"

    def stop() -> None:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()

    try:
        yield Running(address[0], state, stop)
    finally:
        stop()


def default_entry(path: Path, name: str = "smollm", **options: Any) -> ModelEntry:
    import unspool

    return ModelEntry(name, lambda: unspool.load(path, **options), path.stat().st_size)
