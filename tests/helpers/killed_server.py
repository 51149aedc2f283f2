"""Servers that are killed: each is forked from a process that has imported everything.

python -m helpers.killed_server MODEL STATE    # a line on stdin: another server
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


class KilledServers:
    """Starts servers on one state folder, one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self) -> tuple[int, str]:
        """Start a server; return its process id and address."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        pid, _, url = self._process.stdout.readline().strip().partition(" ")
        assert url.startswith("http"), f"the server did not start: {pid} {url}"
        return int(pid), url


@contextlib.contextmanager
def killed_servers(model: Path, state: Path) -> Iterator[KilledServers]:
    """A process that forks servers."""
    command = [sys.executable, "-m", "helpers.killed_server", str(model), str(state)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield KilledServers(process)
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def serve(model: Path, state: Path) -> None:
    """Serve until the process is killed; print its id and address."""
    import unspool
    from unspool.server.app import create_app
    from unspool.server.http import server as serving
    from unspool.server.http.logs import configure_logging
    from unspool.server.http.settings import ServerSettings
    from unspool.server.http.sockets import bind_socket
    from unspool.server.runtime.registry import ModelEntry, ModelRegistry

    configure_logging("error", as_json=False)
    settings = ServerSettings(port=0, drain=1.0, state=state)
    bound = bind_socket(settings)
    entry = ModelEntry("small", lambda: unspool.load(model, memory=8 << 20, threads=1), 1000)
    app, _ = create_app(settings, ModelRegistry([entry], model_memory=1 << 33))

    def started(url: str) -> bool:
        print(os.getpid(), url, flush=True)
        return True

    server = serving.Server(app, settings, on_stopping=lambda: None, on_started=started)
    asyncio.run(server.serve([bound]))


def main(model: str, state: str) -> None:
    import unspool.server.app
    import unspool.server.tree.routes  # noqa: F401  imported once, for all servers

    pid = 0
    for _ in sys.stdin:
        if pid:
            os.waitpid(pid, 0)
        pid = os.fork()
        if pid == 0:
            serve(Path(model), Path(state))
            os._exit(0)
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
