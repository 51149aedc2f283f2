"""Servers that are measured: start, suspend, stop, load by clients, and the CPU time used."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lib.peers import LLAMA, UnavailableError, run_command
from lib.report import say
from lib.stats import percentile

PATH = "/v1/completions"
START_S, STOP_S = 120.0, 30.0


class ServerError(Exception):
    """A server did not start, or has ended."""


@dataclass(frozen=True)
class Server:
    """A server that can be started; {port} in the command is replaced."""

    key: str
    title: str
    command: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)  # of every request, besides the prompt


def unspool_server(model: Path | None, *options: str, running: int = 64) -> Server:
    """`unspool serve`; of the default model if none is given."""
    command = [sys.executable, "-m", "unspool", "serve", "--port", "{port}", *options]
    command += ["--max-running", str(running), "--max-queue", "256"]
    if model is not None:
        command += ["--model", str(model)]
    fields = {"unspool": {"end": False}, "stream_options": {"include_usage": True}}
    return Server("us", "**Unspool**", tuple(command), fields)


def llama_server(binary: Path, gguf: Path, threads: int, length: int, parallel: int) -> Server:
    """llama.cpp's own server, with a slot for each client (continuous batching)."""
    command = [str(binary), "--model", str(gguf), "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--threads", str(threads), "--threads-batch", str(threads), "--no-webui"]
    command += ["--parallel", str(parallel), "--ctx-size", str(parallel * max(512, length))]
    return Server("llama_cpp", "llama.cpp (llama-server)", tuple(command), {"ignore_eos": True})


def build_llama_server(environments: Path) -> Path:
    """Build llama-server natively, once, from the sources that llama-cpp-python comes with."""
    home = environments / "llama_server"
    binary = home / "build" / "bin" / "llama-server"
    if binary.exists():
        return binary
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"{tool} is needed to build llama-server")
    home.mkdir(parents=True, exist_ok=True)
    (package,) = LLAMA.packages
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
    run_command([*download, ":all:", "--dest", str(home), package], "no sources of llama.cpp")
    with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
        archive.extractall(home, filter="data")
    say("building llama-server (once, about a quarter of an hour on two cores)")
    sources = next(home.glob("*/vendor/llama.cpp"))
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
    ]
    run_command(
        ["cmake", "-G", "Ninja", "-S", str(sources), "-B", str(home / "build"), *options],
        "llama-server cannot be configured",
    )
    run_command(
        ["ninja", "-C", str(home / "build"), "llama-server"], "llama-server cannot be built"
    )
    return binary


class RunningServer:
    """A server process, which can be suspended while another server is measured."""

    def __init__(
        self, server: Server, environment: dict[str, str], log: Path, core: int | None = None
    ) -> None:
        """Start the server, on one core if given, and wait until it answers."""
        self.server, self.log, self.port = server, log, free_port()
        command = [word.format(port=self.port) for word in server.command]
        cores = sorted(os.sched_getaffinity(0))
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        if core is not None:  # inherited by the threads that start later
            os.sched_setaffinity(self.process.pid, {cores[core % len(cores)]})
        start = time.perf_counter()
        try:
            self.name = self._wait()
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - start

    def body(self, prompt: str, max_tokens: int, stream: bool = True) -> str:
        fields = {k: v for k, v in self.server.fields.items() if stream or k != "stream_options"}
        fields |= {"model": self.name, "prompt": prompt, "max_tokens": max_tokens}
        return json.dumps({**fields, "temperature": 0, "stream": stream})

    def ask(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """Send one request that is not streamed."""
        status, answer = self.http("POST", PATH, self.body(prompt, max_tokens, stream=False), 300)
        if status != 200:
            raise ServerError(f"status {status}: {answer[:200]!r}")
        return dict(json.loads(answer))

    def load(
        self, prompts: list[list[str]], max_tokens: int, seconds: float, patience: float,
        processes: int = 1,
    ) -> dict[str, Any]:  # fmt: skip
        """Run one client for each list of prompts, in processes that start together."""
        job = {"port": self.port, "path": PATH, "max_tokens": max_tokens, "seconds": seconds}
        job |= {"patience": patience}
        if processes > 1:
            job["began"] = time.monotonic() + 1  # when all of them have started
        clients = [[self.body(text, max_tokens) for text in texts] for texts in prompts]
        jobs = [{**job, "clients": clients[first::processes]} for first in range(processes)]
        with ThreadPoolExecutor(processes) as pool:
            parts = list(pool.map(_run_clients, jobs))
        if self.process.poll() is not None:
            raise ServerError(self._exit_reason())
        for first, part in enumerate(parts):
            for row in part["rows"]:
                row["client"] = first + row["client"] * processes
        sums = {name: sum(part[name] for part in parts) for name in ("not_begun", "cpu_s")}
        return {"rows": [row for part in parts for row in part["rows"]], **sums}

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Terminate the server; kill it if it does not end."""
        self.resume()
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def http(self, verb: str, path: str, body: str | None, timeout: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(verb, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def _wait(self) -> str:
        """Wait for the server; return the model's name."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(self._exit_reason())
            try:
                status, answer = self.http("GET", "/v1/models", None, 5)
                if status == 200:
                    return str(json.loads(answer)["data"][0]["id"])
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.1)
        raise ServerError(f"no answer within {START_S:.0f} s; see {self.log}")

    def _exit_reason(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        texts = [line.strip(" │╭╮╰╯─") for line in lines]  # errors may have a frame
        reason = next((line for line in reversed(texts) if line), "no output")
        return f"ended with status {self.process.wait()}: {reason[:300]} (see {self.log})"


def _run_clients(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-I", str(Path(__file__).with_name("load.py"))]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise ServerError(f"the load generator failed: {done.stderr.strip()[-300:]}")
    return dict(json.loads(done.stdout))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def client_figures(result: dict[str, Any]) -> dict[str, Any]:
    """Throughput and latencies of one load; failed requests count their time, not their tokens."""
    rows = result["rows"]
    good = [row for row in rows if not row["failure"]]
    seconds = max((row["ended"] for row in rows), default=0.0)
    tokens = sum(row["tokens"] for row in good)
    latencies = {
        "first_s": [row["times"][0] - row["sent"] for row in good],
        "gap_s": [b - a for row in good for a, b in pairwise(row["times"])],
        "request_s": [row["ended"] - row["sent"] for row in good],
    }
    return {
        "requests": len(rows), "failed": len(rows) - len(good),
        "failures": dict(Counter(row["failure"] for row in rows if row["failure"])),
        "not_begun": result["not_begun"], "tokens": tokens,
        "lengths": sorted({row["tokens"] for row in good}), "seconds": seconds,
        "tokens_s": tokens / seconds if seconds and tokens else None,
        **{f"{k}_p{p}": percentile(v, p) for k, v in latencies.items() for p in (50, 99)},
        "load_cpu": result["cpu_s"] / seconds if seconds else 0.0,
    }  # fmt: skip


@dataclass(frozen=True)
class CoreSeconds:
    """CPU time so far: of some processes, of the machine, and what all cores could have given."""

    processes: float
    busy: float
    total: float

    @classmethod
    def now(cls, *pids: int) -> "CoreSeconds":
        """Zeros if the system does not report it."""
        tick = os.sysconf("SC_CLK_TCK")
        try:
            ticks = [int(word) for word in stat_words("/proc/stat")[1:9]]
            used = [stat_words(f"/proc/{pid}/stat", ")")[11:13] for pid in pids]
        except (OSError, ValueError, IndexError):
            return cls(0.0, 0.0, 0.0)
        mine = sum(int(word) for pair in used for word in pair)
        busy = sum(ticks) - ticks[3] - ticks[4]
        return cls(mine / tick, busy / tick, sum(ticks) / tick)

    def since(self, before: "CoreSeconds", clients_s: float = 0.0) -> tuple[float, float]:
        """CPU seconds of the processes since then, and the share of all cores used by others."""
        used = self.processes - before.processes
        others = self.busy - before.busy - used - clients_s
        return used, max(0.0, others / max(1e-9, self.total - before.total))


def stat_words(file: str, separator: str = "") -> list[str]:
    """Words of a file's first line, after the last separator."""
    line = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()[0]
    return (line.rsplit(separator, 1)[1] if separator else line).split()
