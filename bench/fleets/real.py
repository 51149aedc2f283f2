"""Real replicas on this machine, and a client that asks them as the simulated clients do.

Each replica is a process of `unspool serve` that is kept on one core. The client sends prompts as
token ids to `/completion`, whose events tell the ids that were written, so that the next turn of a
chat continues exactly what the replica has computed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fleets.requests import Request
from fleets.simulate import Router
from fleets.trace import Session
from serving.servers import free_port
from unspool.scale.replicas.routing import page_hashes

STARTS_WITHIN_S, ENDS_WITHIN_S, ANSWERS_WITHIN_S = 180.0, 60.0, 600.0


class ReplicaError(Exception):
    """A replica did not start, or an answer did not come."""


class RealReplica:
    """One `unspool serve` of its own on one core."""

    def __init__(self, folder: Path, core: int, options: Sequence[str], log: Path | None) -> None:
        self.name, self.port, self.core = f"replica {core}", free_port(), core
        here = Path(__file__).parent
        program = ["-m", "unspool"] if log is None else [str(here / "stepping.py"), str(log)]
        command = [sys.executable, *program, "serve", "--port", str(self.port), "--threads", "1"]
        self.told = folder / f"replica-{core}.log"
        with self.told.open("wb") as told:
            self.process = subprocess.Popen(
                [*command, *options], stdin=subprocess.DEVNULL, stdout=told, stderr=told,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        if hasattr(os, "sched_setaffinity"):  # its threads, which come later, stay there too
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(self.process.pid, {cores[core % len(cores)]})

    def wait_until_ready(self) -> None:
        until = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise ReplicaError(f"{self.name} did not start; what it said is in {self.told}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RealFleet:
    """Replicas 0, 1, ..., each on the core of its number."""

    def __init__(
        self, folder: Path, count: int, options: Sequence[str] = (), logs: Sequence[Path] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.replicas: list[RealReplica] = []
        try:
            for core in range(count):
                log = logs[core] if logs else None
                self.replicas.append(RealReplica(folder, core, options, log))
            for replica in self.replicas:
                replica.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RealFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()


@dataclass(frozen=True)
class CoreSeconds:
    """What has been computed so far: by the replicas, by everybody on this machine, and what could
    have been. Zeros where the system does not tell."""

    replicas: float
    everybody: float
    cores: float

    @classmethod
    def now(cls, replicas: Sequence[RealReplica]) -> CoreSeconds:
        try:
            tick = os.sysconf("SC_CLK_TCK")
            ticks = [int(word) for word in _words("/proc/stat")[1:9]]
            mine = [_words(f"/proc/{one.process.pid}/stat", ")")[11:13] for one in replicas]
        except (OSError, ValueError, IndexError):
            return cls(0.0, 0.0, 0.0)
        idle = ticks[3] + ticks[4]
        used = sum(int(word) for pair in mine for word in pair)
        return cls(used / tick, (sum(ticks) - idle) / tick, sum(ticks) / tick)

    def since(self, before: CoreSeconds) -> tuple[float, float]:
        """What the replicas have computed since then, and the share of all cores that others,
        this client among them, have taken meanwhile."""
        used = self.replicas - before.replicas
        others = self.everybody - before.everybody - used
        return used, max(0.0, others / max(1e-9, self.cores - before.cores))


def _words(file: str, behind: str = "") -> list[str]:
    """Of a file's first line, behind a sign."""
    line = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()[0]
    return (line.rsplit(behind, 1)[1] if behind else line).split()


@dataclass
class Client:
    """Asks replicas, and writes down what came when. Time begins with the client."""

    replicas: Sequence[RealReplica]
    router: Router

    def __post_init__(self) -> None:
        self.ports = {replica.name: replica.port for replica in self.replicas}
        self.load = dict.fromkeys(self.ports, 0)
        self.requests: list[Request] = []
        for name in self.ports:
            self.router.add(name)
        self.began = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    async def play(self, sessions: Sequence[Session]) -> list[Request]:
        """All sessions, each when it begins."""
        self.began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(self._session(session))
        return sorted(self.requests, key=lambda request: request.number)

    async def _session(self, session: Session) -> None:
        await asyncio.sleep(session.begins - self.now)
        answers: list[list[int]] = []
        for turn, said in enumerate(session.turns):
            if turn:
                await asyncio.sleep(said.pause_s)
            prompt = session.prompt(turn, answers)
            request = Request(
                len(self.requests), prompt, said.answer, self.now, session.number, turn
            )
            self.requests.append(request)
            answers.append(await self.ask(request))

    async def ask(self, request: Request) -> list[int]:
        """Send a request where the policy wants it; the tokens of the answer."""
        hashes = page_hashes(request.prompt)
        name = self.router.choose(hashes, self.load)
        self.router.record(name, hashes)
        request.replica, request.attempts = name, 1
        self.load[name] += 1
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                return await self._stream(request, self.ports[name])
        finally:
            self.load[name] -= 1

    async def _stream(self, request: Request, port: int) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        written: list[int] = []
        try:
            writer.write(_post(port, request))
            while line := await reader.readline():
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(line[5:])
                if event.get("stop"):
                    request.cached = event["tokens_cached"]
                    break
                written += event["tokens"]
                request.deliver(len(written), self.now)
        finally:
            writer.close()
        if len(written) != len(request.answer):
            raise ReplicaError(f"{len(written)} of {len(request.answer)} tokens came from {port}")
        request.computed = len(request.prompt) - request.cached
        request.end("finished")
        return written


def _post(port: int, request: Request) -> bytes:
    asked: dict[str, Any] = {
        "prompt": request.prompt, "n_predict": len(request.answer), "ignore_eos": True,
        "stream": True, "seed": request.number, "temperature": 0.8,
    }  # fmt: skip
    body = json.dumps(asked).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
