"""A server on a thread, for processes that Ray owns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from starlette.types import ASGIApp

from unspool.serve.http import server as serving
from unspool.serve.http.listening import bind_socket
from unspool.serve.http.settings import ServerSettings


class ServerThread:
    """A running server, until `stop`; on any free port by default."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        host: str,
        stopping: Callable[[], None],
        port: int = 0,
    ) -> None:
        bound = bind_socket(replace(settings, host=host, port=port))
        name, number = bound.getsockname()[:2]
        self.address = f"[{name}]:{number}" if ":" in name else f"{name}:{number}"
        self._drain = settings.drain
        ready = threading.Event()

        def started(address: str) -> bool:
            ready.set()
            return True

        self._server = serving.Server(app, settings, on_stopping=stopping, on_started=started)

        def serve() -> None:
            try:
                serving.run_server(self._server, bound)
            finally:
                ready.set()

        self._thread = threading.Thread(target=serve, name="server", daemon=True)
        self._thread.start()
        ready.wait()  # until the first model is loaded, or has failed to load

    def check(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the server's thread has ended")

    def stop(self) -> None:
        """Refuse new requests, finish running ones, and stop."""
        self._server.stop()
        self._thread.join(self._drain + 5.0)
