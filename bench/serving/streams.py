"""Our server alone, at up to hundreds of streams: what reaches the clients, and what that costs.

On a GPU with a model folder, or with random weights of Qwen3-0.6B's shape; or with a model that
does nothing, so that what remains is what serving costs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from peers.environments import say
from serving import servers
from serving.made_model import write_model
from serving.report import Figures, figures
from serving.servers import Running, Server, ServerError

HERE = Path(__file__).parent
PROMPT = 128  # characters, which are tokens where the vocabulary is made up
CLIENT_PROCESSES = 4
COLUMNS = {
    "tokens_s": ("tokens/s", 1.0, ",.0f"),
    "first_s_p50": ("first token p50, ms", 1e3, ",.0f"),
    "first_s_p99": ("p99", 1e3, ",.0f"),
    "gap_s_p50": ("between tokens p50, ms", 1e3, ".1f"),
    "gap_s_p99": ("p99", 1e3, ".1f"),
    "http_us": ("HTTP, µs of a core a token", 1.0, ".1f"),
    "engine_us": ("engine, µs", 1.0, ".1f"),
    "load_cpu": ("clients, cores", 1.0, ".2f"),
    "failed": ("failed", 1.0, "d"),
}


def server(device: str, model: str | None, out: Path, step_ms: float) -> Server:
    """What is to be measured: `unspool serve` on a device, or the model that does nothing."""
    if device == "null":
        command = (sys.executable, str(HERE / "null_server.py"), "{port}", str(step_ms))
        asked = {"stream_options": {"include_usage": True}}
        return Server("null", "a model that does nothing", command, asked)
    folder = Path(model) if model else out / "random-0.6b"
    if not model and not (folder / "model.safetensors").exists():
        say(f"random weights of Qwen3-0.6B's shape are written to {folder}")
        write_model(folder)
    return servers.ours(folder, "--device", device, running=1024)


def measure(given: argparse.Namespace) -> int:
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = server(given.device, given.model, given.out, given.step_ms)
    running = Running(wanted, dict(os.environ), given.out / f"{wanted.key}.stderr.txt")
    say(f"{wanted.title}: ready after {running.start_s:.1f} s")
    points: dict[int, Figures] = {}
    try:
        _point(running, 0, max(given.clients), 16)  # warms up
        for number, clients in enumerate(given.clients, 1):
            points[clients] = _point(running, number, clients, given.tokens)
            say(f"{clients} streams: {points[clients]['tokens_s'] or 0:,.0f} tokens/s")
    except ServerError as reason:
        say(f"stopped: {reason}")
    finally:
        running.close()
    table = _table(points)
    (given.out / "streams.md").write_text(table, encoding="utf-8")
    (given.out / "streams.json").write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")
    print(table)
    failures = {why for point in points.values() for why in point["failures"]}
    for why in sorted(failures):
        say(f"failed: {why}")
    return int(len(points) < len(given.clients) or bool(failures))


def _point(running: Running, number: int, clients: int, tokens: int) -> Figures:
    """One request of each client, all at once."""
    prompts = [[_prompt(number, client)] for client in range(clients)]
    before = _thread_seconds(running.process.pid)
    found = running.load(prompts, tokens, 120, 300, min(CLIENT_PROCESSES, clients))
    after = _thread_seconds(running.process.pid)
    point = figures(found)
    used = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
    http = used.pop(running.process.pid)  # the event loop runs on the first thread
    each = 1e6 / max(1, point["tokens"])
    return {**point, "http_us": http * each, "engine_us": sum(used.values()) * each}


def _prompt(number: int, client: int) -> str:
    """No two begin alike, so that nothing is reused."""
    return (f"{number}:{client}:" + "the quick brown fox jumps over the lazy dog " * 4)[:PROMPT]


def _thread_seconds(process: int) -> dict[int, float]:
    """What each thread of a process has computed so far."""
    tick, found = os.sysconf("SC_CLK_TCK"), dict[int, float]()
    for task in Path(f"/proc/{process}/task").iterdir():
        words = (task / "stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1]
        user, system = words.split()[11:13]
        found[int(task.name)] = (int(user) + int(system)) / tick
    return found


def _table(points: dict[int, Figures]) -> str:
    head = ["streams", *(title for title, _, _ in COLUMNS.values())]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for clients, point in points.items():
        cells = [_cell(point.get(name), *column[1:]) for name, column in COLUMNS.items()]
        lines.append(f"| {clients} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any, factor: float, form: str) -> str:
    if value is None:
        return "—"
    return format(value if form == "d" else value * factor, form)
