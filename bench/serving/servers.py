"""The servers: how each is started, asked, kept still between its turns, and stopped."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.environments import PEERS, UnavailableError, make_environment

PATH = "/v1/completions"
START_S, GRACE_S = 120.0, 30.0
HERE = Path(__file__).parent
# What the `server` extra of llama-cpp-python 0.3.36 asks for, without that package itself.
LLAMA_EXTRA = (
    "fastapi>=0.100.0",
    "uvicorn>=0.22.0",
    "sse-starlette>=1.6.1",
    "starlette-context>=0.3.6,<0.4",
    "pydantic-settings>=2.0.1",
    "PyYAML>=5.1",
)


class ServerError(Exception):
    """A server did not start, or is gone."""


@dataclass(frozen=True)
class Server:
    """A server that can be started."""

    key: str
    title: str
    command: tuple[str, ...]  # {port} stands for the port
    asked: dict[str, Any] = field(default_factory=dict)  # in every request, beside the prompt


def ours(model: Path | None, *options: str, running: int = 64) -> Server:
    """`unspool serve`, as it is shown to users; the default model where none is given."""
    command = [sys.executable, "-m", "unspool", "serve", "--port", "{port}", *options]
    command += ["--max-running", str(running), "--max-queue", "256"]
    if model is not None:
        command += ["--model", str(model)]
    asked = {"unspool": {"end": False}, "stream_options": {"include_usage": True}}
    return Server("us", "**Unspool**", tuple(command), asked)


def llama(python: str, gguf: Path, threads: int, length: int, ends: frozenset[int]) -> Server:
    """llama-cpp-python's server: one request after the other, behind a lock.

    Without `--interrupt_requests False` a new request cuts off the stream that is being written.
    `--logits_all False` spares it the logits of the prompt, that its server computes by default.
    Tokens that end a text are forbidden by a bias: it has no other way to ask for an exact length.
    """
    command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--host", "127.0.0.1"]
    command += ["--port", "{port}", "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    command += ["--n_ctx", str(max(2048, length)), "--interrupt_requests", "False"]
    command += ["--logits_all", "False", "--verbose", "False"]
    asked = {"logit_bias": {str(token): -100 for token in sorted(ends)}}
    return Server("llama_cpp", "llama.cpp (llama-cpp-python's server)", tuple(command), asked)


def llama_python(environments: Path) -> str:
    """A Python with llama.cpp as bench/cpu.py has built it, and with what its server needs.

    The server's packages are in an environment of their own, that looks into the other one for
    llama.cpp: that is built once, which takes a quarter of an hour, and stays as it is.
    """
    peer = next(peer for peer in PEERS if peer.key == "llama_cpp")
    home = environments / peer.folder
    make_environment(home, peer.packages, peer.building, ())
    python = make_environment(environments / f"{peer.folder}_server", LLAMA_EXTRA, {}, ())
    for folder in (environments / f"{peer.folder}_server" / "lib").glob("python*/site-packages"):
        built = home / "lib" / folder.parent.name / "site-packages"
        if not built.is_dir():
            raise UnavailableError(f"{built} is not there: another version of Python built it")
        (folder / "llama_cpp.pth").write_text(f"{built}\n", encoding="utf-8")
    return python


class Running:
    """A server in a process of its own, stopped by a signal except while it has its turn."""

    def __init__(self, server: Server, environment: dict[str, str], log: Path) -> None:
        self.server, self.log, self.port = server, log, free_port()
        command = [word.format(port=self.port) for word in server.command]
        with log.open("wb") as said:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment
            )
        began = time.perf_counter()
        try:
            self.name = self._wait()
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - began

    def body(self, prompt: str, most: int, stream: bool = True) -> str:
        """A request's body."""
        asked = {k: v for k, v in self.server.asked.items() if stream or k != "stream_options"}
        asked |= {"model": self.name, "prompt": prompt, "max_tokens": most, "temperature": 0}
        return json.dumps({**asked, "stream": stream})

    def ask(self, prompt: str, most: int) -> dict[str, Any]:
        """One request, answered as a whole."""
        status, found = self._http("POST", PATH, self.body(prompt, most, stream=False), 300)
        if status != 200:
            raise ServerError(f"status {status}: {found[:200]!r}")
        answer: dict[str, Any] = json.loads(found)
        return answer

    def load(
        self,
        prompts: list[list[str]],
        most: int,
        seconds: float,
        patience: float,
        processes: int = 1,
    ) -> dict[str, Any]:
        """What clients see that send these prompts, each client one after the other; the clients
        are dealt out to so many processes, which begin together."""
        job = {"port": self.port, "path": PATH, "max_tokens": most, "seconds": seconds}
        job |= {"patience": patience}
        if processes > 1:
            job["began"] = time.monotonic() + 1  # when all of them have started
        clients = [[self.body(text, most) for text in mine] for mine in prompts]
        hands = [clients[first::processes] for first in range(processes)]
        with ThreadPoolExecutor(processes) as pool:
            parts = list(pool.map(lambda mine: _generate({**job, "clients": mine}), hands))
        if self.process.poll() is not None:
            raise ServerError(self._last_words())
        for first, part in enumerate(parts):
            for row in part["rows"]:
                row["client"] = first + row["client"] * processes
        return {
            "rows": [row for part in parts for row in part["rows"]],
            "not_begun": sum(part["not_begun"] for part in parts),
            "cpu_s": sum(part["cpu_s"] for part in parts),
        }

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ask it to end, by its own number; make it end where it does not."""
        self.resume()
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def _wait(self) -> str:
        """The model's name, once the server tells it."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise ServerError(self._last_words())
            try:
                status, found = self._http("GET", "/v1/models", None, 5)
                if status == 200:
                    return str(json.loads(found)["data"][0]["id"])
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.1)
        raise ServerError(f"did not answer within {START_S:.0f} s; see {self.log}")

    def _http(self, verb: str, path: str, body: str | None, patience: float) -> tuple[int, bytes]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience)
        try:
            line.request(verb, path, body, {"Content-Type": "application/json"} if body else {})
            answer = line.getresponse()
            return answer.status, answer.read()
        finally:
            line.close()

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        words = [line.strip(" │╭╮╰╯─") for line in lines]  # errors may stand in a frame
        reason = next((line for line in reversed(words) if line), "it said nothing")
        return f"ended with status {self.process.wait()}: {reason[:300]} (see {self.log})"


def _generate(job: dict[str, Any]) -> dict[str, Any]:
    """One process of clients."""
    command = [sys.executable, "-I", str(HERE / "load.py")]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise ServerError(f"the load generator failed: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        port: int = line.getsockname()[1]
        return port


class Others:
    """What everybody else takes of the cores while a server is measured; zero if not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.before = self._seen()

    def share(self) -> float:
        now = self._seen()
        others, every = now[0] - self.before[0], now[1] - self.before[1]
        return max(0.0, others / every) if self.before[1] and every > 0 else 0.0

    def _seen(self) -> tuple[float, float]:
        """Seconds of all cores in which others ran, a host's other guests too, and all seconds."""
        try:
            ticks = [int(word) for word in _stat("/proc/stat").splitlines()[0].split()[1:9]]
            words = _stat(f"/proc/{self.pid}/stat").rsplit(")", 1)[1].split()
            server = int(words[11]) + int(words[12])
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)  # the clients are a child
        used = [resource.getrusage(kind) for kind in kinds]
        tick = os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]
        mine = server / tick + sum(one.ru_utime + one.ru_stime for one in used)
        return (sum(ticks) - idle) / tick - mine, sum(ticks) / tick


def _stat(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace")
