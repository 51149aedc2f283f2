"""A server on a thread of its own: in a process that belongs to Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from starlette.types import ASGIApp

from unspool.serve.http import server as serving
from unspool.serve.http.listening import bound_socket
from unspool.serve.http.settings import ServeSettings


class ServerThread:
    """Serves from the moment it is made, until `stop`; on any free port unless it is given one."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        host: str,
        stopping: Callable[[], None],
        port: int = 0,
    ) -> None:
        bound = bound_socket(replace(settings, host=host, port=port))
        name, number = bound.getsockname()[:2]
        self.address = f"[{name}]:{number}" if ":" in name else f"{name}:{number}"
        self._drain = settings.drain
        ready = threading.Event()

        def started(address: str) -> bool:
            ready.set()
            return True

        self._server = serving.Server(app, settings, stopping=stopping, started=started)

        def serve() -> None:
            try:
                serving.run_server(self._server, bound)
            finally:
                ready.set()

        self._thread = threading.Thread(target=serve, name="server", daemon=True)
        self._thread.start()
        ready.wait()  # until the first model is loaded, or could not be

    def check(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the server's thread has ended")

    def stop(self) -> None:
        """Take nothing new, finish what runs, end."""
        self._server.stop()
        self._thread.join(self._drain + 5.0)
