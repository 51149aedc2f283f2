"""Our server beside llama.cpp's on a CPU: python bench/serve.py [--rounds 5] [--clients 1,4,16,64]

`unspool serve` and llama-cpp-python's server (`python -m llama_cpp.server`) on the same GGUF file
with the same number of threads, each in a process of its own. They take turns within each round,
and what is compared are ratios within a round. The one that does not have its turn is kept still.
Writes table.md, results.json, plots and what the servers said into --out.

clients   of a process of their own, on the same cores: each sends requests one after the other, the
          next when the one before has ended, all clients begin at once; streamed, greedy, and of
          exactly --tokens tokens. No two prompts begin alike: caches of prefixes help nobody
measured  new tokens a second of all clients; p50 and p99 of the time to the first token, of the
          time between two events that bring text (0 for those that arrive together), and of a
          whole request
bare      the same 16 prompts at once through our server and, in turns, in a process that writes
          them with `lm.begin`, without HTTP: what serving costs; and in one that writes them with
          llama.cpp in one batch: about the most that a server could reach with it by batching

llama-cpp-python's server takes requests one after the other, behind a lock: clients wait long for
their first token and then have the machine to themselves. Requests that fail are counted and named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cpu import machine
from peers.environments import (
    PEERS,
    US,
    Peer,
    UnavailableError,
    draw,
    environment,
    prepare,
    say,
)
from peers.workers import Worker, WorkerError
from serving import servers, streams
from serving.report import AT, Figures, figures, markdown
from serving.servers import Running, Server, ServerError

ROOT = Path(__file__).parent.parent
LLAMA = next(peer for peer in PEERS if peer.key == "llama_cpp")
PROMPT = 64  # tokens, about
MOST = 8  # requests of one client at a point
EXAMPLES = """examples:
  python bench/serve.py                                 about a quarter of an hour on two cores
  python bench/serve.py --clients 1,16 --rounds 3 --out results
  python bench/serve.py --only ours --clients 16 --rounds 1    a quick look, with the bare engine
  python bench/serve.py --only llama --tokens 32 --requests 16
  python bench/serve.py --model model.gguf --threads 4 --seconds 60
  python bench/serve.py --device cuda --tokens 128      our server on a GPU, at 1 to 256 streams
  python bench/serve.py --device null --clients 256     what serving itself costs"""


class Texts:
    """Prompts of prose from the documentation. Each begins with a number of its own."""

    def __init__(self, tokenizer: Any, words: list[str]) -> None:
        self.tokenizer, self.words, self.given = tokenizer, words, 0

    def take(self) -> str:
        self.given += 1
        start = self.given * 37 % len(self.words)
        text = [f"{self.given}:", *(self.words[start:] + self.words)[:PROMPT]]
        while len(self.tokenizer.encode(" ".join(text))) > PROMPT:
            text.pop()
        return " ".join(text)


class Bench:
    """One comparison: the servers that could be had, and what their clients saw."""

    def __init__(self, given: argparse.Namespace, gguf: Path, tokenizer: Any) -> None:
        self.given, self.gguf, self.tokenizer = given, gguf, tokenizer
        pages = "\n".join(page.read_text("utf-8") for page in sorted(ROOT.glob("docs/*.md")))
        self.texts = Texts(tokenizer, re.findall(r"\b[A-Za-z]+\b[,.]?", pages))
        self.servers: dict[str, dict[str, Any]] = {}
        self.points: dict[str, dict[str, list[Figures | None]]] = {}
        self.bare: dict[str, list[float | None]] = {"server": []}
        self.running: dict[str, Running] = {}
        self.engines: dict[str, Worker] = {}  # without a server
        self.stack = ExitStack()

    def start(self) -> None:
        given = self.given
        if given.only != "llama":
            ours = servers.ours(self.gguf if given.model else None, "--threads", str(given.threads))
            self._start(ours)
        if given.only != "ours":
            title = servers.llama("", self.gguf, 1, 1, frozenset()).title
            try:
                python = servers.llama_python(given.environments)
            except UnavailableError as reason:
                self.servers["llama_cpp"] = {"title": title, "failed": [f"{reason}"]}
                say(f"llama_cpp: {reason}")
            else:
                length = PROMPT * 2 + given.tokens
                ends = self.tokenizer.end_ids
                self._start(servers.llama(python, self.gguf, given.threads, length, ends))
        if "us" in self.running:
            self._start_bare("engine", US)
        if len(self.running) > 1:
            self._start_bare("llama_cpp", LLAMA)

    def _start_bare(self, key: str, peer: Peer) -> None:
        threads, text = self.given.threads, self.tokenizer.encode(self.texts.take())
        try:
            ready = prepare(peer, self.given.environments, self.gguf, False)
            worker = Worker(ready.command(threads), environment(threads))
            self.engines[key] = self.stack.enter_context(worker)
            worker.ask(work="write", prompts=[text], new=2)
        except (UnavailableError, WorkerError) as reason:
            self.engines.pop(key, None)
            say(f"without a server: {key}: {reason}")
            self.servers["us"]["failed"].append(f"without a server: {key}: {reason}")
        else:
            self.bare[key] = []

    def _start(self, server: Server) -> None:
        entry: dict[str, Any] = {"title": server.title, "command": server.command, "failed": []}
        self.servers[server.key] = entry
        log = self.given.out / f"{server.key}.stderr.txt"
        try:
            running = Running(server, environment(self.given.threads), log)
        except (ServerError, OSError) as reason:
            self._fail(server.key, f"could not be started: {reason}")
            return
        self.stack.callback(running.close)
        self.running[server.key] = running
        entry["start_s"] = running.start_s
        try:
            entry["check"] = self._check(running)
        except ServerError as reason:
            self._fail(server.key, f"could not be asked: {reason}")
        running.pause()

    def _check(self, running: Running) -> dict[str, Any]:
        """Whether tokens are counted right: the same text streamed, and as a whole. Warms up, too:
        as many requests as the greatest point has clients, at most 16."""
        text = self.texts.take()
        whole = running.ask(text, self.given.tokens)["usage"]["completion_tokens"]
        rows = running.load([[text]], self.given.tokens, 300, 600)["rows"]
        if rows[0]["failure"]:
            raise ServerError(rows[0]["failure"])
        streamed, events = rows[0]["tokens"], len(rows[0]["times"])
        count = min(AT, max(self.given.clients))
        running.load([[self.texts.take()] for _ in range(count)], 4, 300, 600)
        say(f"{running.server.key}: {whole} tokens, of which {streamed} were counted in a stream "
            f"of {events} events with text ({rows[0]['counted']})")  # fmt: skip
        return {"whole": whole, "streamed": streamed, "events": events}

    def _fail(self, key: str, reason: str) -> None:
        """Remember that a server is lost, and say so at once."""
        say(f"{key}: {reason}")
        self.servers[key]["failed"].append(reason)
        running = self.running.pop(key, None)
        if running is not None:
            running.close()

    def close(self) -> None:
        self.stack.close()

    # -- rounds ----------------------------------------------------------------------------------

    def rounds(self) -> None:
        for number in range(self.given.rounds):
            for clients in self.given.clients:
                each = max(1, min(MOST, self.given.requests // clients))
                prompts = [[self.texts.take() for _ in range(each)] for _ in range(clients)]
                for key in self._turns(number):
                    found = self._point(key, prompts)
                    places = self.points.setdefault(key, {}).setdefault(str(clients), [])
                    places.extend([None] * (number - len(places)))  # rounds that it missed
                    places.append(found)
                    self._tell(number, key, clients, found)
            if self.engines:
                self._bare(number)

    def _turns(self, number: int) -> list[str]:
        """Who begins changes from round to round."""
        keys = list(self.running)
        return keys[::-1] if number % 2 else keys

    def _point(self, key: str, prompts: list[list[str]]) -> Figures | None:
        running, given = self.running.get(key), self.given
        if running is None:
            return None
        running.resume()
        others = servers.Others(running.process.pid)
        try:
            found = running.load(prompts, given.tokens, given.seconds, given.seconds + 600)
        except ServerError as reason:
            self._fail(key, str(reason))
            return None
        finally:
            share = others.share()
            running.pause()
        return {**figures(found), "others": share}

    def _bare(self, number: int) -> None:
        """The same prompts at once, through our server and without one."""
        prompts = [self.texts.take() for _ in range(AT)]
        seen: dict[str, float | None] = {}
        for who in list(self.bare)[:: -1 if number % 2 else 1]:
            if who == "server":
                found = self._point("us", [[text] for text in prompts])
                seen[who] = found["tokens_s"] if found and not found["failed"] else None
                continue
            texts = prompts if who == "engine" else [self.tokenizer.encode(t) for t in prompts]
            try:
                done = self.engines[who].ask(work="write", prompts=texts, new=self.given.tokens)
                seen[who] = AT * self.given.tokens / done["seconds"]
            except WorkerError as reason:
                self.servers["us"]["failed"].append(f"without a server: {who}: {reason}")
                seen[who] = None
        for who, speed in seen.items():
            self.bare[who].append(speed)
        titles = {"server": "our server", "engine": "our engine", "llama_cpp": "llama.cpp, batched"}
        said = [f"{titles[who]} {seen[who] or 0:.0f}" for who in self.bare]
        say(f"round {number + 1}: {AT} prompts at once, tokens/s: {', '.join(said)}")

    def _tell(self, number: int, key: str, clients: int, found: Figures | None) -> None:
        where = f"round {number + 1}: {clients:2d} clients: {key}:"
        if found is None or not found["tokens_s"]:
            reasons = "; ".join(found["failures"]) if found else "gone"
            say(f"{where} nothing: {reasons}")
            return
        say(f"{where} {found['tokens_s']:.1f} tokens/s, p99 {found['first_s_p99']:.2f} s to the "
            f"first, {(found['gap_s_p99'] or 0) * 1000:.1f} ms between tokens, "
            f"{found['requests']} requests, {found['failed']} failed, clients took "
            f"{found['load_cpu']:.1%} of a core, others {found['others']:.0%} of all")  # fmt: skip

    def results(self) -> dict[str, Any]:
        given = self.given
        return {
            "machine": machine(),
            "model": self.gguf.name,
            "prompt": PROMPT,
            **{name: getattr(given, name) for name in ("threads", "rounds", "tokens", "clients")},
            **{name: getattr(given, name) for name in ("requests", "seconds")},
            "servers": self.servers,
            "points": self.points,
            "bare": self.bare,
        }


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended too
    if given.device != "cpu":
        return streams.measure(given)
    from unspool.loading import open_tokenizer
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.model.hub.find import find_model

    gguf = find_model(given.model)
    tokenizer = open_tokenizer(open_checkpoint(gguf))
    assert tokenizer is not None
    given.environments.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    bench, code = Bench(given, gguf, tokenizer), 0
    try:
        bench.start()
        bench.rounds()
    except WorkerError as reason:
        say(f"stopped: {reason}")
        code = 1
    except KeyboardInterrupt:
        say("interrupted; what was measured until now follows")
        code = 130
    finally:
        bench.close()
    results = json.loads(json.dumps(bench.results()))
    file = given.out / "results.json"
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = markdown(results)
    (given.out / "table.md").write_text(table, encoding="utf-8")
    print(table)
    if bench.points:
        script = Path(__file__).parent / "serving" / "plot.py"
        draw(script, file, given.out, given.environments)
    lost = any(entry["failed"] for entry in bench.servers.values())
    return code or int(lost)


def arguments() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each server has its turn")
    parser.add_argument(
        "--clients", metavar="NUMBERS", help="at once (1,4,16,64; 1,16,64,256 with --device)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="that each request asks for")
    parser.add_argument(
        "--device", default="cpu",
        help="cuda: our server alone on a GPU, --model a folder, or random weights of Qwen3-0.6B's "
        "shape; null: with a model that does nothing, to see what serving costs",
    )  # fmt: skip
    parser.add_argument(
        "--step-ms", type=float, default=5.0, help="that a step takes with --device null"
    )
    parser.add_argument(
        "--requests", type=int, default=32,
        help=f"at a point, all clients together; at most {MOST} and at least 1 a client",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="after which a point begins no more requests"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2, help="of a server")
    parser.add_argument("--only", choices=("ours", "llama"), help="one server alone")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (the default model)")
    parser.add_argument("--out", type=Path, default=Path("bench-serve"), metavar="FOLDER")
    parser.add_argument(
        "--environments", type=Path, default=cache / "unspool-bench", metavar="FOLDER",
        help="where llama.cpp and its server are kept (%(default)s)",
    )  # fmt: skip
    given = parser.parse_args()
    if given.clients is None:
        given.clients = "1,4,16,64" if given.device == "cpu" else "1,16,64,256"
    try:
        given.clients = sorted({int(word) for word in given.clients.split(",") if word})
    except ValueError:
        parser.error(f"--clients: {given.clients!r} is not a list of numbers such as 1,4,16")
    counts = (given.rounds, given.tokens, given.requests, given.threads, *given.clients)
    if min(counts) < 1 or not given.clients or given.seconds <= 0:
        parser.error("numbers must be at least 1")
    return given


if __name__ == "__main__":
    sys.exit(main())
