"""Us beside the peers on a CPU: python bench/cpu.py [--rounds 5] [--only NAMES] [--work NAMES]

Each engine runs in an environment and a process of its own, with the same number of threads. They
take turns within each round, and what is compared are ratios within a round: a machine that is
busy or warm slows all of them. Writes table.md, results.json and plots into --out.

decode   a prompt of 32 tokens, 128 greedy tokens; tokens a second after the first
prompt   a prompt of 512 tokens; its tokens a second up to the first one written
batch    16 texts at once, prompts of 64, 128 new tokens each; new tokens a second of all together,
         with the reading of the prompts in the time
memory   the most memory a fresh process ever held: after decode, and after batch
cold     seconds from starting a process to the first token on its output
quality  KL divergence to the same weights in 32 bits, on 2,000 tokens of a book
growth   tokens a second against context (128 to 8,000), batch (1 to 64) and threads; us and
         llama.cpp
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from peers import measure, quality
from peers.environments import (
    PEERS,
    US,
    Ready,
    UnavailableError,
    draw,
    environment,
    prepare,
    say,
)
from peers.random_model import random_model
from peers.report import markdown
from peers.workers import Worker, WorkerError, cold_start

ROOT = Path(__file__).parent.parent
WORKS = ("decode", "prompt", "batch", "memory", "cold", "quality", "growth")
GROWING = ("us", "llama_cpp")
REFERENCE = "transformers_fp32"
EXAMPLES = """examples:
  python bench/cpu.py                                   everything; the first time installs for long
  python bench/cpu.py --only llama_cpp,onnxruntime --work decode,prompt --rounds 9
  python bench/cpu.py --only transformers --work quality
  python bench/cpu.py --only llama_cpp --work growth --threads 4
  python bench/cpu.py --random --only llama_cpp --work decode,prompt,batch    recurrent layers
  python bench/cpu.py --installed --only llama_cpp      engines that this Python has already"""


class Bench:
    """One comparison: the engines that could be had, what they did, why the others could not."""

    def __init__(self, given: argparse.Namespace, gguf: Path, prompts: measure.Prompts) -> None:
        self.given, self.gguf, self.prompts = given, gguf, prompts
        self.ready: dict[str, Ready] = {}
        self.engines: dict[str, dict[str, Any]] = {}
        self.stack = ExitStack()
        self.workers: dict[str, Worker] = {}
        self.bandwidth: dict[str, list[float]] = {"80": [], "300": []}
        self.growth: measure.Grown = {}

    def prepare(self) -> None:
        for peer in PEERS:
            if not chosen(peer.key, self.given.only):
                continue
            entry: dict[str, Any] = {"title": peer.title, "weights": peer.weights, "failed": {}}
            self.engines[peer.key] = entry
            try:
                self.ready[peer.key] = prepare(
                    peer, self.given.environments, self.gguf, self.given.installed
                )
            except UnavailableError as reason:
                self.fail(peer.key, "all", reason)

    def fail(self, key: str, work: str, reason: object) -> None:
        """Remember that an engine cannot do something, and say so at once."""
        say(f"{key}: {work}: {reason}")
        self.engines[key]["failed"][work] = str(reason)
        if work == "all":
            self.ready.pop(key, None)
            worker = self.workers.pop(key, None)
            if worker is not None:
                worker.close()

    def start(self, key: str, threads: int | None = None) -> Worker:
        threads = threads or self.given.threads
        return Worker(self.ready[key].command(threads), environment(threads))

    def start_all(self) -> None:
        of_file = {peer.key for peer in PEERS if peer.model == "gguf"}  # whose weights we read too
        for key in list(self.ready):
            try:
                worker = self.stack.enter_context(self.start(key))
            except WorkerError as reason:
                self.fail(key, "all", reason)
                continue
            self.workers[key] = worker
            weights = self.engines[US.key if key in of_file else key]["weights"]
            self.engines[key] |= {
                "engine": worker.engine,
                "weights": worker.weights or weights,
                "load_s": worker.load_s,
                "weight_bytes": worker.weight_bytes,
            }

    def close(self) -> None:
        self.stack.close()

    # -- the kinds of work -------------------------------------------------------------------

    def rounds(self, works: list[str]) -> None:
        """Decode, prompt and batch, the engines taking turns; the first, short round warms up."""
        for number in range(-1, self.given.rounds):
            say(f"round {number + 1} of {self.given.rounds}" if number >= 0 else "warming up")
            if number >= 0:
                for size in self.bandwidth:
                    speed = measure.bandwidth(self.given.threads, int(size))
                    self.bandwidth[size].append(speed)
            for work in works:
                self._round(work, warm=number < 0)

    def _round(self, work: str, warm: bool) -> None:
        texts = self._texts(work)
        first: list[int] | None = None
        for key in list(self.workers):
            results = self.engines[key].setdefault(work, [])
            if work in self.engines[key]["failed"]:
                continue
            try:
                found = self._run(work, self.workers[key], texts, warm)
            except WorkerError as reason:
                self.fail(key, work, reason)
                continue
            if warm:
                continue
            results.append(found.tokens_s)
            first = first or found.ids[0]
            if work == "decode":
                same = measure.agreement(first, found.ids[0])
                self.engines[key].setdefault("same_tokens", []).append(same)

    def _texts(self, work: str) -> list[list[int]]:
        length = {"decode": measure.DECODE_PROMPT, "prompt": measure.PROMPT}
        rows = measure.BATCH if work == "batch" else 1
        return [self.prompts.take(length.get(work, measure.BATCH_PROMPT)) for _ in range(rows)]

    def _run(self, work: str, worker: Worker, texts: list[list[int]], warm: bool) -> measure.Speed:
        if work == "prompt":
            return measure.prompt(worker, texts[0])
        if work == "batch":
            return measure.batch(worker, texts, 2 if warm else measure.BATCH_NEW)
        return measure.decode(worker, texts[0], 8 if warm else measure.DECODE_NEW)

    def memory(self) -> None:
        """Fresh processes, so that nothing but the job is in the figure."""
        for key in list(self.ready):
            say(f"memory: {key}")
            try:
                with self.start(key) as worker:
                    measure.decode(worker, self.prompts.take(measure.DECODE_PROMPT))
                    self.engines[key]["memory_mb"] = worker.ask(work="memory")["peak_mb"]
                    measure.batch(worker, self._texts("batch"))
                    self.engines[key]["memory_batch_mb"] = worker.ask(work="memory")["peak_mb"]
            except WorkerError as reason:
                self.fail(key, "memory", reason)

    def cold(self) -> None:
        for number in range(-1, self.given.rounds):  # the first only brings files into memory
            for key in list(self.ready):
                threads = self.given.threads
                try:
                    taken = cold_start(self.ready[key].cold(threads), environment(threads))
                except WorkerError as reason:
                    if "cold" not in self.engines[key]["failed"]:
                        self.fail(key, "cold", reason)
                    continue
                if number >= 0:
                    self.engines[key].setdefault("cold", []).append(taken)

    def quality(self, ids: list[int]) -> None:
        """Needs transformers in 32 bits as the reference, also where it is not compared with."""
        say("quality")
        others = {key: worker for key, worker in self.workers.items() if key != REFERENCE}
        with ExitStack() as stack:
            reference = self.workers.get(REFERENCE)
            if reference is None:
                peer = next(peer for peer in PEERS if peer.key == REFERENCE)
                ready = prepare(peer, self.given.environments, self.gguf, self.given.installed)
                threads = self.given.threads
                reference = stack.enter_context(
                    Worker(ready.command(threads), environment(threads))
                )
            found = quality.divergence(others, reference, ids)
        for key, figures in found.items():
            self.engines.setdefault(key, {"title": "fp32", "failed": {}})["quality"] = figures

    def grow(self) -> None:
        rounds = min(self.given.rounds, 3)
        workers = {key: self.workers[key] for key in GROWING if key in self.workers}
        most = os.cpu_count() or 1
        for threads in sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n < most} | {most}):
            say(f"growth: {threads} threads")
            for key in workers:
                with self.start(key, threads) as worker:
                    texts = [self.prompts.take(measure.DECODE_PROMPT) for _ in range(rounds + 1)]
                    speeds = [measure.decode(worker, text).tokens_s for text in texts]
                for speed in speeds[1:]:
                    measure.note(self.growth, key, "threads", threads, speed)
        measure.growth(
            workers, self.prompts, rounds, self.growth, lambda what: say(f"growth: {what}")
        )

    def results(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "threads": self.given.threads,
            "rounds": self.given.rounds,
            "model": self.gguf.name,
            "bandwidth": self.bandwidth,
            "engines": self.engines,
            "growth": self.growth,
        }


def chosen(key: str, only: list[str]) -> bool:
    """Whether an engine was asked for; we always are."""
    return not only or key == US.key or any(key.startswith(name) for name in only)


def machine() -> dict[str, Any]:
    """What this was measured on."""
    name = platform.processor()
    if shutil.which("lscpu"):
        said = subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines()
        names = [line.split(":", 1)[1].strip() for line in said if line.startswith("Model name")]
        name = names[0] if names else name
    return {
        "processor": name,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
    }


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are ended too
    from unspool.loading import open_tokenizer
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.model.hub.find import find_model

    given.environments.mkdir(parents=True, exist_ok=True)
    if given.random:
        random_model(given.environments / "random-qwen3.5-0.8b.gguf")
        given.model = str(given.environments / "random-qwen3.5-0.8b.gguf")
    gguf = find_model(given.model)
    tokenizer = open_tokenizer(open_checkpoint(gguf))
    assert tokenizer is not None
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/*.md")))
    bench = Bench(given, gguf, measure.Prompts(tokenizer.encode(pages)))
    given.out.mkdir(parents=True, exist_ok=True)
    code = 0
    try:
        works(bench, tokenizer)
    except (UnavailableError, WorkerError) as reason:
        say(f"stopped: {reason}")
        code = 1
    except KeyboardInterrupt:
        say("interrupted; what was measured until now follows")
        code = 130
    file = given.out / "results.json"
    try:
        results = bench.results()  # before the workers end, so that nothing can be lost
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    finally:
        bench.close()
    table = markdown(results)
    (given.out / "table.md").write_text(table, encoding="utf-8")
    print(table)
    if not code:
        script = Path(__file__).parent / "peers" / "plot.py"
        draw(script, file, given.out, given.environments)
    return code


def works(bench: Bench, tokenizer: Any) -> None:
    """Everything that was asked for; fresh processes last, when the others are gone."""
    given = bench.given
    bench.prepare()
    turns = [work for work in ("decode", "prompt", "batch") if work in given.work]
    if turns or set(given.work) & {"quality", "growth"}:
        bench.start_all()
    if turns:
        bench.rounds(turns)
    if "quality" in given.work:
        text = given.text.read_text(encoding="utf-8") if given.text else None
        bench.quality(tokenizer.encode(text or quality.books(given.environments)))
    if "growth" in given.work:
        bench.grow()
    bench.close()
    if "memory" in given.work:
        bench.memory()
    if "cold" in given.work:
        bench.cold()


def arguments() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [peer.key for peer in PEERS if peer is not US]
    parser.add_argument("--rounds", type=int, default=5, help="how often each engine has its turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--only", default="", metavar="NAMES", help=f"of {', '.join(names)}")
    parser.add_argument("--work", default=",".join(WORKS), metavar="NAMES", help="of the above")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (the default model)")
    parser.add_argument(
        "--random", action="store_true", help="a random model of Qwen3.5-0.8B's shape instead"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), metavar="FOLDER")
    parser.add_argument(
        "--environments", type=Path, default=cache / "unspool-bench", metavar="FOLDER",
        help="where engines and converted weights are kept (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--installed", action="store_true", help="install nothing: use what this Python has"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="for quality, instead of a book")
    given = parser.parse_args()
    given.only = [name for name in given.only.split(",") if name]
    given.work = [name for name in given.work.split(",") if name]
    for kind, words, known in (("--only", given.only, names), ("--work", given.work, list(WORKS))):
        for word in words:
            if not any(name.startswith(word) for name in known):
                parser.error(f"{kind}: {word!r} is not one of {', '.join(known)}")
    if given.rounds < 1 or given.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    return given


if __name__ == "__main__":
    sys.exit(main())
