"""Our server and llama.cpp's on a CPU: python bench/serve.py [--rounds 5] [--clients 1,4,16,64]

`unspool serve` and llama.cpp's own server (`llama-server`, built natively, a slot for each client)
with the same GGUF file and number of threads. They take turns within each round, and ratios are
taken within a round; the server that is not measured is suspended. Writes table.md, results.json,
serve.svg and the output of the servers to --out.

clients   in a separate process on the same cores: each sends requests one after the other, all
          start together; streamed, greedy and of exactly --tokens tokens. No two prompts share a
          prefix, so prefix caches do not help
measured  new tokens/s of all clients; p50 and p99 of the time to the first token, of the time
          between two events with text (0 if they arrive together), and of a request
bare      the same 16 prompts through our server and, in turns, in a process that writes them with
          `lm.begin`, without HTTP: the cost of serving; and with llama.cpp in one batch: about the
          most that a server based on it could reach

Failed requests are counted and reported.
With --device, only our server is measured, with up to hundreds of streams.
"""

import argparse
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lib import report, stats
from lib.arguments import add_options, list_of, make_parser
from lib.models import write_model
from lib.peers import (
    CACHE,
    LLAMA,
    US,
    Peer,
    UnavailableError,
    Worker,
    WorkerError,
    install,
    thread_environment,
)
from lib.report import say
from lib.servers import (
    CoreSeconds,
    RunningServer,
    Server,
    ServerError,
    build_llama_server,
    client_figures,
    llama_server,
    stat_words,
    unspool_server,
)
from unspool.costs.part import Series

ROOT = Path(__file__).parent.parent
PROMPT = 64  # tokens, about
MAX_REQUESTS = 8  # of one client at a point
BATCH = 16  # prompts of the comparison without a server
LATENCIES = {
    "first_s": ("to the first token", "s", 1.0, ".2f"),
    "gap_s": ("between tokens", "ms", 1e3, ".1f"),
    "request_s": ("of a request", "s", 1.0, ".2f"),
}
BARE = {"server": "our server", "engine": "our engine", "llama_cpp": "llama.cpp, batched"}
EXAMPLES = """examples:
  python bench/serve.py                                 about a quarter of an hour on two cores
  python bench/serve.py --clients 1,16 --rounds 3 --out results
  python bench/serve.py --only ours --clients 16 --rounds 1    a quick look, with the bare engine
  python bench/serve.py --only llama --tokens 32 --requests 16
  python bench/serve.py --model model.gguf --threads 4 --seconds 60
  python bench/serve.py --device cuda --tokens 128      our server on a GPU, 1 to 256 streams
  python bench/serve.py --device null --clients 256     the cost of serving itself"""


class Texts:
    """Prompts of prose from the documentation; each starts with another number."""

    def __init__(self, tokenizer: Any) -> None:
        pages = "\n".join(page.read_text("utf-8") for page in sorted(ROOT.glob("docs/**/*.md")))
        self.words = re.findall(r"\b[A-Za-z]+\b[,.]?", pages)
        self.tokenizer, self.count = tokenizer, 0

    def next(self) -> str:
        self.count += 1
        start = self.count * 37 % len(self.words)
        text = [f"{self.count}:", *(self.words[start:] + self.words)[:PROMPT]]
        while len(self.tokenizer.encode(" ".join(text))) > PROMPT:
            text.pop()
        return " ".join(text)


class Bench:
    """One comparison: the running servers and what their clients measured."""

    def __init__(self, args: argparse.Namespace, gguf: Path, tokenizer: Any) -> None:
        self.args, self.gguf, self.tokenizer = args, gguf, tokenizer
        self.texts = Texts(tokenizer)
        self.servers: dict[str, dict[str, Any]] = {}
        self.points: dict[str, dict[str, list[dict[str, Any] | None]]] = {}
        self.bare: dict[str, list[float | None]] = {"server": []}
        self.running: dict[str, RunningServer] = {}
        self.engines: dict[str, Worker] = {}  # without a server
        self.stack = ExitStack()

    def start(self) -> None:
        args = self.args
        if args.only != "llama":
            model = self.gguf if args.model else None
            self._start(unspool_server(model, "--threads", str(args.threads)))
        if args.only != "ours":
            try:
                binary, length = build_llama_server(args.environments), PROMPT * 2 + args.tokens
                parallel = max(BATCH, *args.clients)
                self._start(llama_server(binary, self.gguf, args.threads, length, parallel))
            except UnavailableError as reason:
                self.servers["llama_cpp"] = {"title": "llama.cpp", "failed": []}
                self._fail("llama_cpp", str(reason))
        if "us" in self.running:
            self._start_engine("engine", US)
        if len(self.running) > 1:
            self._start_engine("llama_cpp", LLAMA)

    def _start_engine(self, key: str, peer: Peer) -> None:
        try:
            installed = install(peer, self.args.environments, self.gguf)
            worker = self.stack.enter_context(installed.start(self.args.threads))
            prompt = self.tokenizer.encode(self.texts.next())
            worker.ask(work="write", prompts=[prompt], new=2)
        except (UnavailableError, WorkerError) as reason:
            say(f"without a server: {key}: {reason}")
            self.servers["us"]["failed"].append(f"without a server: {key}: {reason}")
        else:
            self.engines[key], self.bare[key] = worker, []

    def _start(self, server: Server) -> None:
        entry: dict[str, Any] = {"title": server.title, "command": server.command, "failed": []}
        self.servers[server.key] = entry
        log = self.args.out / f"{server.key}.stderr.txt"
        try:
            running = RunningServer(server, thread_environment(self.args.threads), log)
            self.stack.callback(running.close)
            self.running[server.key] = running
            entry |= {"start_s": running.start_s, "check": self._check(running)}
            running.pause()
        except (ServerError, OSError) as reason:
            self._fail(server.key, f"could not be started: {reason}")

    def _check(self, running: RunningServer) -> dict[str, int]:
        """Count the tokens of one text with and without streaming, and warm up."""
        text = self.texts.next()
        total = running.ask(text, self.args.tokens)["usage"]["completion_tokens"]
        (row,) = running.load([[text]], self.args.tokens, 300, 600)["rows"]
        if row["failure"]:
            raise ServerError(row["failure"])
        count = min(BATCH, max(self.args.clients))
        running.load([[self.texts.next()] for _ in range(count)], 4, 300, 600)
        return {"whole": total, "streamed": row["tokens"], "events": len(row["times"])}

    def _fail(self, key: str, reason: str) -> None:
        say(f"{key}: {reason}")
        self.servers[key]["failed"].append(reason)
        if key in self.running:
            self.running.pop(key).close()

    def run_rounds(self) -> None:
        for number in range(self.args.rounds):
            for clients in self.args.clients:
                count = max(1, min(MAX_REQUESTS, self.args.requests // clients))
                prompts = [[self.texts.next() for _ in range(count)] for _ in range(clients)]
                for key in stats.alternate(list(self.running), number):
                    point = self._measure(key, prompts)
                    points = self.points.setdefault(key, {}).setdefault(str(clients), [])
                    points.extend([None] * (number - len(points)))  # rounds that it missed
                    points.append(point)
                    speed = point and point["tokens_s"]
                    say(f"round {number + 1}: {clients} clients: {key}: {speed or 0:.1f} tokens/s")
            if self.engines:
                self._measure_bare(number)

    def _measure(self, key: str, prompts: list[list[str]]) -> dict[str, Any] | None:
        running, args = self.running.get(key), self.args
        if running is None:
            return None
        running.resume()
        before = CoreSeconds.now(running.process.pid)
        try:
            result = running.load(prompts, args.tokens, args.seconds, args.seconds + 600)
            _, others = CoreSeconds.now(running.process.pid).since(before, result["cpu_s"])
        except ServerError as reason:
            self._fail(key, str(reason))
            return None
        finally:
            running.pause()
        return {**client_figures(result), "others": others}

    def _measure_bare(self, number: int) -> None:
        """Write the same prompts through our server and without one."""
        prompts = [self.texts.next() for _ in range(BATCH)]
        speeds: dict[str, float | None] = {}
        for key in stats.alternate(list(self.bare), number):
            if key == "server":
                point = self._measure("us", [[text] for text in prompts])
                speeds[key] = point["tokens_s"] if point and not point["failed"] else None
                continue
            texts = prompts if key == "engine" else [self.tokenizer.encode(t) for t in prompts]
            try:
                done = self.engines[key].ask(work="write", prompts=texts, new=self.args.tokens)
                speeds[key] = BATCH * self.args.tokens / done["seconds"]
            except WorkerError as reason:
                self.servers["us"]["failed"].append(f"without a server: {key}: {reason}")
                speeds[key] = None
        for key, values in self.bare.items():
            values.append(speeds[key])
        texts = [f"{BARE[key]} {speeds[key] or 0:.0f}" for key in self.bare]
        say(f"round {number + 1}: {BATCH} prompts, tokens/s: {', '.join(texts)}")

    def results(self) -> dict[str, Any]:
        names = ("threads", "rounds", "tokens", "clients", "requests", "seconds")
        return {
            **report.provenance(), "model": self.gguf.name, "prompt": PROMPT,
            **{name: getattr(self.args, name) for name in names},
            "servers": self.servers, "points": self.points, "bare": self.bare,
        }  # fmt: skip


# -- report ----------------------------------------------------------------------------------------


def values(results: dict[str, Any], key: str, clients: int, name: str) -> list[float | None]:
    """A figure of a server at a number of clients, for each round."""
    rounds = results["points"].get(key, {}).get(str(clients), [])
    return [point.get(name) if point else None for point in rounds]


def format_time(seconds: float | None, kind: str) -> str:
    _, _, scale, form = LATENCIES[kind]
    return "—" if seconds is None else f"{seconds * scale:{form}}"


def markdown(results: dict[str, Any]) -> str:
    parts = [
        f"{report.describe_machine(results)}, the servers in turns; the clients share the cores. "
        f"Each client sends different prompts of about {results['prompt']} tokens, one after the "
        f"other, and streams {results['tokens']} greedy tokens."
    ]
    keys = [key for key in results["servers"] if results["points"].get(key)]
    if keys:
        titles = [f"{title}, p50 / p99, {unit}" for title, unit, _, _ in LATENCIES.values()]
        header = ["clients", "server", "tokens/s", *titles, "requests", "failed"]
        rows = [_row(results, key, n) for n in results["clients"] for key in keys]
        parts.append(report.table(header, filter(None, rows)))
    if {"us", "llama_cpp"} <= set(keys):
        parts.append(
            "Ratios within a round, median (minimum to maximum); above 1 we are ahead: tokens/s "
            "ours by theirs, times theirs by ours."
        )
        names = [f"{kind}_{p}" for kind in LATENCIES for p in ("p50", "p99")]
        titles = [f"{title}, {p}" for title, *_ in LATENCIES.values() for p in ("p50", "p99")]
        ratios = [
            [n, *(stats.format_ratio(_ratio(results, n, name)) for name in ("tokens_s", *names))]
            for n in results["clients"]
        ]
        parts.append(report.table(["clients", "tokens/s", *titles], ratios))
    parts += [text for text in (_bare_text(results["bare"]), _notes(results)) if text]
    return "\n\n".join(parts) + "\n"


def _row(results: dict[str, Any], key: str, clients: int) -> list[str]:
    points = [point for point in results["points"][key].get(str(clients), []) if point]
    if not points:
        return []
    speed = stats.median([point["tokens_s"] for point in points])
    cells = [str(clients), results["servers"][key]["title"], f"{speed:,.0f}" if speed else "—"]
    for kind in LATENCIES:
        medians = [stats.median([p[f"{kind}_{share}"] for p in points]) for share in ("p50", "p99")]
        cells.append(" / ".join(format_time(value, kind) for value in medians))
    return [*cells, *(f"{sum(p[name] for p in points):,}" for name in ("requests", "failed"))]


def _ratio(results: dict[str, Any], clients: int, name: str) -> dict[str, float] | None:
    """Above 1 where we are ahead."""
    us, llama = (values(results, key, clients, name) for key in ("us", "llama_cpp"))
    return stats.paired_ratio(us, llama) if name == "tokens_s" else stats.paired_ratio(llama, us)


def _bare_text(bare: dict[str, list[float | None]]) -> str:
    server, engine, llama = (stats.median(bare.get(key, [])) for key in BARE)
    if server is None or engine is None:
        return ""
    ratio = stats.format_ratio(stats.paired_ratio(bare["server"], bare["engine"]))
    text = (
        f"The same {BATCH} prompts: {server:,.0f} tokens/s through our server, {engine:,.0f} in "
        f"process without it: {ratio}."
    )
    if llama is None:
        return text
    ratio = stats.format_ratio(stats.paired_ratio(bare["server"], bare["llama_cpp"]))
    return f"{text} llama.cpp in process, in one batch: {llama:,.0f}; our server has {ratio}."


def _notes(results: dict[str, Any]) -> str:
    """Failures and disturbances."""
    lines = []
    for key, entry in results["servers"].items():
        title = entry["title"].strip("*")
        lines += [f"- {title}: {reason}" for reason in entry["failed"]]
        check = entry.get("check")
        if check and check["streamed"] != check["whole"]:
            counts = f"{check['streamed']} tokens instead of {check['whole']}"
            lines.append(f"- {title}: counted {counts} in a stream: do not trust its tokens/s")
        for clients, rounds in results["points"].get(key, {}).items():
            for point in filter(None, rounds):
                where = f"- {title}, {clients} clients"
                lines += [f"{where}: {n} failed: {why}" for why, n in point["failures"].items()]
                if point["not_begun"]:
                    limit = f"within {results['seconds']:g} s"
                    lines.append(f"{where}: {point['not_begun']} requests not started {limit}")
                if point["lengths"] not in ([], [results["tokens"]]):
                    lines.append(f"{where}: texts of {point['lengths']} tokens")
                if point["others"] > 0.05:
                    used = f"{point['others']:.0%} of the cores"
                    lines.append(f"{where}: other processes used {used}")
    return "\n".join(["Notes:", "", *dict.fromkeys(lines)]) if lines else ""


def draw(results: dict[str, Any]) -> str:
    """Throughput and p99 against clients; bands from the minimum to the maximum of the rounds."""
    panels: list[report.Panel] = []
    scales = {"tokens_s": ("tokens/s, all clients", 1.0)}
    scales |= {f"{k}_p99": (f"p99 {t}, {unit}", s) for k, (t, unit, s, _) in LATENCIES.items()}
    for name, (title, scale) in scales.items():
        lines = []
        for key in results["points"]:
            columns = []
            for n in results["clients"]:
                numbers = [v * scale for v in values(results, key, n, name) if v]
                if numbers:
                    columns.append((n, stats.median(numbers) or 0.0, min(numbers), max(numbers)))
            if columns:
                label = results["servers"][key]["title"].strip("*").split(" (")[0]
                x, y, low, high = zip(*columns, strict=True)
                lines.append(Series(label, x, y, low, high, "clients", title, log_x=True))
        if lines:
            panels.append((title, lines))
    return report.sheet(panels, 2)


# -- our server with many streams ------------------------------------------------------------------

COLUMNS = {
    "tokens_s": ("tokens/s", 1.0, ",.0f"),
    "first_s_p50": ("first token p50, ms", 1e3, ",.0f"),
    "first_s_p99": ("p99", 1e3, ",.0f"),
    "gap_s_p50": ("between tokens p50, ms", 1e3, ".1f"),
    "gap_s_p99": ("p99", 1e3, ".1f"),
    "http_us": ("HTTP, CPU µs per token", 1.0, ".1f"),
    "engine_us": ("engine, µs", 1.0, ".1f"),
    "load_cpu": ("clients, cores", 1.0, ".2f"),
    "failed": ("failed", 1, "d"),
}


def measure_streams(args: argparse.Namespace) -> int:
    """Measure our server on a GPU, or with the null model, which shows the cost of serving."""
    if args.device == "null":
        script = str(Path(__file__).with_name("null_server.py"))
        command = (sys.executable, script, "{port}", str(args.step_ms))
        fields = {"stream_options": {"include_usage": True}}
        server = Server("null", "the null model", command, fields)
    else:
        folder = Path(args.model) if args.model else args.out / "random-0.6b"
        if not args.model and not (folder / "model.safetensors").exists():
            say(f"writing random weights in the shape of Qwen3-0.6B to {folder}")
            write_model(folder)
        server = unspool_server(folder, "--device", args.device, running=1024)
    running = RunningServer(server, dict(os.environ), args.out / f"{server.key}.stderr.txt")
    say(f"{server.title}: ready after {running.start_s:.1f} s")
    points: dict[int, dict[str, Any]] = {}
    try:
        _measure_streams(running, 0, max(args.clients), 16)  # warms up
        for number, clients in enumerate(args.clients, 1):
            points[clients] = _measure_streams(running, number, clients, args.tokens)
            say(f"{clients} streams: {points[clients]['tokens_s'] or 0:,.0f} tokens/s")
    except ServerError as reason:
        say(f"stopped: {reason}")
    finally:
        running.close()
    rows = [
        [clients, *(_cell(point.get(name), *column[1:]) for name, column in COLUMNS.items())]
        for clients, point in points.items()
    ]
    text = report.table(["streams", *(title for title, _, _ in COLUMNS.values())], rows) + "\n"
    (args.out / "streams.md").write_text(text, encoding="utf-8")
    report.write_json(args.out / "streams.json", points)
    print(text)
    failures = {reason for point in points.values() for reason in point["failures"]}
    for reason in sorted(failures):
        say(f"failed: {reason}")
    return int(len(points) < len(args.clients) or bool(failures))


def _measure_streams(running: RunningServer, number: int, clients: int, tokens: int) -> Any:
    """One request of each client, all together; prompts of 128 characters, none alike."""
    prose = "the quick brown fox jumps over the lazy dog " * 4
    prompts = [[f"{number}:{client}:{prose}"[:128]] for client in range(clients)]
    before = _thread_seconds(running.process.pid)
    point = client_figures(running.load(prompts, tokens, 120, 300, min(4, clients)))
    after = _thread_seconds(running.process.pid)
    used = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
    http = used.pop(running.process.pid)  # the event loop runs on the first thread
    per_token = 1e6 / max(1, point["tokens"])
    return {**point, "http_us": http * per_token, "engine_us": sum(used.values()) * per_token}


def _thread_seconds(process: int) -> dict[int, float]:
    """CPU time of each thread of a process so far."""
    tick, times = os.sysconf("SC_CLK_TCK"), dict[int, float]()
    for task in Path(f"/proc/{process}/task").iterdir():
        user, system = stat_words(f"{task}/stat", ")")[11:13]
        times[int(task.name)] = (int(user) + int(system)) / tick
    return times


def _cell(value: Any, factor: float, form: str) -> str:
    return "—" if value is None else format(value * factor, form)


# -- command line ----------------------------------------------------------------------------------


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended too
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device != "cpu":
        return measure_streams(args)
    from unspool.loading import open_tokenizer
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.model.hub.find import find_model

    gguf = find_model(args.model)
    args.environments.mkdir(parents=True, exist_ok=True)
    bench, code = Bench(args, gguf, open_tokenizer(open_checkpoint(gguf))), 0
    try:
        bench.start()
        bench.run_rounds()
    except WorkerError as reason:
        say(f"stopped: {reason}")
        code = 1
    except KeyboardInterrupt:
        say("interrupted; the measurements so far follow")
        code = 130
    finally:
        bench.stack.close()
    results = bench.results()
    report.write_results(args.out, results, markdown(results))
    if bench.points:
        (args.out / "serve.svg").write_text(draw(results), encoding="utf-8")
    return code or int(any(entry["failed"] for entry in bench.servers.values()))


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    text = "clients in parallel (1,4,16,64; 1,16,64,256 with --device)"
    parser.add_argument("--clients", type=list_of(int), metavar="NUMBERS", help=text)
    parser.add_argument("--only", choices=("ours", "llama"), help="only one server")
    add_options(
        parser,
        ("--rounds", 5, "turns of each server"),
        ("--tokens", 64, "tokens per request"),
        ("--device", "cpu", "cuda: our server on a GPU (--model: a folder); null: the null model"),
        ("--step-ms", 5.0, "time of a step with --device null"),
        ("--requests", 32, f"requests of all clients; 1 to {MAX_REQUESTS} per client"),
        ("--seconds", 120.0, "start no request of a point after this time"),
        ("--threads", os.cpu_count() or 2, "threads of a server"),
        ("--model", str, "GGUF file (the default model)"),
        ("--out", Path("bench-serve")),
        ("--environments", CACHE, "folder of llama.cpp and its server (%(default)s)"),
    )
    args = parser.parse_args()
    default = [1, 4, 16, 64] if args.device == "cpu" else [1, 16, 64, 256]
    args.clients = sorted(set(args.clients or default))
    counts = (args.rounds, args.tokens, args.requests, args.threads, *args.clients)
    if min(counts) < 1 or args.seconds <= 0:
        parser.error("numbers must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
