"""Unspool on a GPU, the device's limits and transformers: python bench/gpu.py [PART ...] [--quick]

Random weights of published shapes (bench/lib/shapes.py), all through the public API
(`lm.stream` with a seed for each text), nothing is downloaded. First the device is measured: bytes
read per second and a product of bfloat16 matrices. The limit of a part is the larger of its bytes
over the bandwidth and its operations over the FLOP/s; reported is the fraction reached.

one text   a prompt, then tokens/s after the first one
many       requests submitted together: new tokens/s of all, prefill included; eight of the texts
           are written again alone and compared
drafts     the same with cached prompts and a drafter whose tokens are right with a given
           probability; times the speed without drafts
mtp        one text with drafts of an MTP layer, which costs time, and whose tokens are right with a
           given probability
first      seconds from the request to its first token, as a fraction of the limit
server     tokens/s that reach the clients of `unspool serve`, see bench/serve.py
load       seconds of `unspool.load` of a checkpoint on disk, and of only reading the files
peers      transformers: a static cache with compiled decoding, and continuous batching

Each model runs in a separate process. A part that fails or takes too long is reported, and the next
one runs. Writes table.md and results.json to --out after every part.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from lib import report
from lib.arguments import add_options, make_parser
from lib.limits import Limits, least_seconds

EXAMPLES = """examples:
  python bench/gpu.py                        the full table, about 8 minutes on an H200
  python bench/gpu.py --quick                the three shapes, without transformers: under a minute
  python bench/gpu.py 8b 8b-2300 --no-peers
  python bench/gpu.py 0.6b --backend torch   the reference path, for comparison
  python bench/gpu.py --tiny --device cpu    test of the benchmark itself, without a GPU"""
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One line of the table."""

    key: str
    title: str
    shape: str
    work: str = "one"  # one text, many, drafts, mtp, first (time to the first token), load, server
    prompt: int = 128
    new: int = 256
    rows: int = 1
    options: dict[str, Any] = field(default_factory=lambda: dict(GREEDY))
    packed: str = ""  # quantization of a GGUF file, instead of bfloat16
    exact: bool = False
    acceptance: float = 0.0  # probability that a drafted token is right
    drafted: int = 0  # tokens of a draft of the MTP layer
    peers: tuple[str, ...] = ()  # modes of transformers that do the same
    seconds: float = 150  # time limit

    @property
    def model(self) -> tuple[str, str, bool]:
        """Parts with the same model share a process."""
        return self.shape, self.packed, self.exact

    @property
    def context(self) -> int:
        return self.prompt + self.new + 8

    def tiny(self) -> "Part":
        limits = (("prompt", 24), ("new", 4), ("rows", 3))
        return replace(self, **{name: min(getattr(self, name), most) for name, most in limits})


_BATCH: dict[str, Any] = {"work": "many", "rows": 256, "new": 128}
_LONG: dict[str, Any] = {"work": "many", "rows": 64, "prompt": 512, "new": 128}
PARTS = {
    part.key: part
    for part in (
        Part(key="8b", title="8B bf16, one text", shape="8b", peers=("static",)),
        Part(key="8b-sampled", title="8B bf16, one text, sampled", shape="8b", options=SAMPLED),
        Part(key="8b-2300", title="8B bf16, one text behind 2,300 tokens", shape="8b",
             prompt=2300, new=128),
        Part(key="8b-16000", title="8B bf16, one text behind 16,000 tokens", shape="8b",
             prompt=16000, new=128),
        Part(key="8b-first", title="8B bf16, first token behind 4,096", shape="8b", work="first",
             prompt=4096, new=1),
        Part(key="8b-64", title="8B bf16, 64 requests of 512 + 128", shape="8b",
             peers=("continuous", "static"), **_LONG),
        Part(key="135m", title="135M bf16, one text", shape="135m", peers=("static",)),
        Part(key="135m-sampled", title="135M bf16, one text, sampled", shape="135m",
             options=SAMPLED),
        Part(key="0.6b", title="0.6B bf16, 256 requests of 128 + 128", shape="0.6b",
             peers=("continuous", "static"), **_BATCH),
        Part(key="0.6b-sampled", title="the same, sampled (T 0.8, top-p 0.95)", shape="0.6b",
             options=SAMPLED, **_BATCH),
        Part(key="8b-q4", title="8B at 4 bits (Q4_0), one text", shape="8b", packed="Q4_0"),
        Part(key="8b-q4k", title="8B at 4 bits (Q4_K), one text", shape="8b", packed="Q4_K"),
        Part(key="8b-q8", title="8B at 8 bits (Q8_0), one text", shape="8b", packed="Q8_0"),
        Part(key="8b-load", title="8B bf16, from the disk to the GPU", shape="8b", work="load",
             seconds=240),
        Part(key="server", title="our server, 0.6B bf16, 256 streams of 128 + 128", shape="0.6b",
             work="server", rows=256, new=128, seconds=180),
        Part(key="8b-first-16000", title="8B bf16, first token behind 16,000", shape="8b",
             work="first", prompt=16000, new=1),
        *(
            Part(key=name, title=f"{title} bf16, one text", shape=name)
            for name, title in (
                ("qwen3.5-0.8b", "Qwen3.5-0.8B"), ("qwen3.5-9b", "Qwen3.5-9B"),
                ("gemma4", "Gemma 4 (5B)"), ("lfm2-1.2b", "LFM2-1.2B"),
                ("granite4-h-micro", "Granite 4.0-H-Micro"),
                ("nemotron-nano-9b", "Nemotron-Nano-9B"),
            )
        ),
        Part(key="qwen3.5-0.8b-256", title="Qwen3.5-0.8B bf16, 256 requests of 128 + 128",
             shape="qwen3.5-0.8b", **_BATCH),
        Part(key="qwen3.5-0.8b-first", title="Qwen3.5-0.8B bf16, first token behind 4,096",
             shape="qwen3.5-0.8b", work="first", prompt=4096, new=1),
        *(
            part
            for name, title, packed in (
                ("qwen3.6-35b-a3b", "Qwen3.6-35B-A3B at 4 bits (Q4_0)", "Q4_0"),
                ("gpt-oss-20b", "gpt-oss-20b (MXFP4)", "MXFP4"),
            )
            for part in (
                Part(key=name, title=f"{title}, one text", shape=name, packed=packed),
                Part(key=f"{name}-64", title=f"{title}, 64 requests of 128 + 128", shape=name,
                     packed=packed, work="many", rows=64, new=128),
            )
        ),
        Part(key="8b-exact", title="8B bf16, one text, exact", shape="8b", exact=True),
        Part(key="135m-exact", title="135M bf16, one text, exact", shape="135m", exact=True),
        *(
            Part(key=f"8b-drafts-{rows}-{acceptance}", work="drafts", rows=rows, new=128,
                 title=f"8B bf16, {rows} at once, three drafted tokens, right {acceptance:.0%}",
                 shape="8b", acceptance=acceptance)
            for rows in (1, 4, 16) for acceptance in (0.5, 0.7, 0.9)
        ),
        *(
            Part(key=f"8b-mtp-{count}-{acceptance}", work="mtp", shape="8b", new=128,
                 drafted=count, acceptance=acceptance,
                 title=f"8B bf16, one text, MTP layer, {count} drafted, right {acceptance:.0%}")
            for count, acceptance in ((1, 0.0), (3, 0.0), (1, 0.8), (3, 0.7), (3, 0.9))
        ),
        Part(key="8b-64-exact", title="8B bf16, 64 requests of 512 + 128, exact", shape="8b",
             exact=True, **_LONG),
        Part(key="0.6b-exact", title="0.6B bf16, 256 requests of 128 + 128, exact", shape="0.6b",
             exact=True, **_BATCH),
    )
}  # fmt: skip
QUICK = ("8b", "135m", "135m-sampled", "0.6b", "0.6b-sampled")
FULL = tuple(key for key in PARTS if key not in ("8b-q4k", "8b-q8"))


class Bench:
    """One run: the results of its parts, and the reasons of failures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.results: dict[str, Any] = {
            **report.provenance(), "versions": versions(), "limits": None, "parts": {},
            "failed": {},
        }  # fmt: skip
        self.deadline = time.monotonic() + args.limit

    def run(self, names: list[str]) -> None:
        """Run parts in one process; after a crash, the remaining ones in a new process."""
        while names:
            if self.deadline - time.monotonic() < 5:
                self.results["failed"].update(dict.fromkeys(names, "no time remained"))
                return
            names = self._run_process(names)

    def command(self, names: list[str]) -> list[str]:
        """Command that measures these parts and reports each in a line."""
        args, script = self.args, Path(__file__).with_name("gpu_worker.py")
        options = ["--device", args.device, "--backend", args.backend, "--scratch", args.scratch]
        options += ["--rounds", args.rounds, *(["--tiny"] if args.tiny else []), *names]
        return [sys.executable, str(script), *map(str, options)]

    def _run_process(self, names: list[str]) -> list[str]:
        """Run one process; return the parts that remain when it has ended."""
        process = subprocess.Popen(
            self.command(names), stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        timer = self._start_timer(process, names[0])
        for line in process.stdout:
            message = json.loads(line)
            name = message["part"]
            timer.cancel()
            if "begin" not in message:
                names = names[names.index(name) + 1 :]
                self._store(name, message)
            timer = self._start_timer(process, names[0] if names else name)
        timer.cancel()
        code = process.wait()
        if not (names and code):
            return []
        reason = "it took too long, or memory ran out" if code == -9 else "its process ended"
        self._store(names[0], {"error": f"{reason} (exit status {code})"})
        return names[1:]

    def _start_timer(self, process: subprocess.Popen[str], name: str) -> threading.Timer:
        part = PARTS.get(name.partition("@")[0])
        seconds = min(part.seconds if part else 60.0, self.deadline - time.monotonic())
        timer = threading.Timer(max(seconds, 1), process.kill)
        timer.daemon = True
        timer.start()
        return timer

    def _store(self, name: str, message: dict[str, Any]) -> None:
        if "error" in message:
            self.results["failed"][name] = message["error"]
            print(f"{name}: {message['error']}", flush=True)
        else:
            result = message["result"]
            if name == "limits":
                self.results["limits"] = result
            else:
                self.results["parts"][name] = result
            print(describe(name, result, self.results["limits"]), flush=True)
        self.write()

    def write(self) -> str:
        text = markdown(self.results)
        report.write_json(self.args.out / "results.json", self.results)
        (self.args.out / "table.md").write_text(text, encoding="utf-8")
        return text


def group_parts(names: list[str], *, together: bool, peers: bool) -> list[list[str]]:
    """Parts that share a process: those of one model; transformers' come last."""
    unspool: dict[Any, list[str]] = {}
    transformers: dict[str, list[str]] = {}
    for name in names:
        key, _, mode = name.partition("@")
        part = PARTS[key]
        if not mode:
            loads_model = part.work in ("load", "server")
            unspool.setdefault("all" if together else (part.model, loads_model), []).append(name)
        for way in (mode,) if mode else part.peers if peers else ():
            transformers.setdefault(part.shape + way, []).append(f"{key}@{way}")
    return [["limits"], *unspool.values(), *transformers.values()]


def versions() -> str:
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    names = ("torch", "triton", "transformers")
    return ", ".join(f"{name} {installed[name]}" for name in names if name in installed)


def describe(name: str, result: dict[str, Any], limits: Limits | None) -> str:
    """A part in one line."""
    if name == "limits":
        return (
            f"{result['device']}: reads {result['bandwidth'] / 1e12:.2f} TB/s, "
            f"multiplies bf16 at {result['flops'] / 1e12:.0f} TFLOP/s"
        )
    if "bytes_s" in result:
        return (
            f"{name}: {result['bytes'] / 1e9:.1f} GB in {result['seconds']:.1f} s "
            f"({result['bytes_s'] / 1e9:.2f} GB/s; cached {result['cached_s']:.1f} s, reading "
            f"only {result['disk_s']:.1f} s, first token after {result['first_s']:.1f} s)"
        )
    share = fraction(result, limits)
    texts = [f"{name}: {result['tokens_s']:,.1f} tokens/s"]
    if share is not None:
        texts.append(f"{share:.1%} of the limit")
    if "first_s" in result:
        texts.append(f"first token {result['first_s'] * 1e3:,.1f} ms")
    if "same_alone" in result:
        texts.append(f"same alone {result['same_alone']}")
    if "speedup" in result:
        texts.append(f"{result['speedup']:.2f}x without drafts")
        texts.append(f"{result['accepted']:.0%} of the drafted tokens accepted")
    texts += [f"{key} {result[key]:.1f} s" for key in ("load_s", "warm_s") if key in result]
    if "memory_bytes" in result:
        texts.append(f"memory {result['memory_bytes'] / 1e9:.1f} GB")
    return ", ".join(texts)


def fraction(result: dict[str, Any], limits: Limits | None) -> float | None:
    """Fraction of the limit that was reached."""
    if limits is None or not result.get("floor"):
        return None
    return least_seconds(result["floor"], limits) / float(result["seconds"])


def markdown(results: dict[str, Any]) -> str:
    header = (
        "work", "tokens/s", "limit", "of the limit", "first token, ms", "same alone",
        "transformers", "ours to theirs",
    )  # fmt: skip
    entries, limits = results["parts"], results["limits"]
    lines = [f"{describe('limits', limits, None)}; {results['versions']}.", ""] if limits else []
    rows = [_row(part, entries, limits) for part in PARTS.values() if part.key in entries]
    failed = [f"- {name} could not be measured: {why}" for name, why in results["failed"].items()]
    return "\n".join([*lines, report.table(header, rows), "", *failed]).rstrip() + "\n"


def _row(part: Part, entries: dict[str, Any], limits: Limits | None) -> list[str]:
    entry = entries[part.key]
    share, speed = fraction(entry, limits), entry.get("tokens_s")
    if part.work == "load":
        reached = f"{entry['disk_s'] / entry['seconds']:.0%} of reading only"
        measured = [f"{entry['bytes_s'] / 1e9:.2f} GB/s", "–", reached]
    else:
        limit = speed / share if share else None
        measured = [_number(speed), _number(limit), "–" if share is None else f"{share:.0%}"]
    peers = [
        entry["tokens_s"] for name, entry in entries.items() if name.startswith(f"{part.key}@")
    ]
    best = max(peers, default=None)
    ratio = f"{speed / best:.1f}x" if best and speed else "–"
    first = _number(entry["first_s"] * 1e3)
    return [part.title, *measured, first, entry.get("same_alone", "–"), _number(best), ratio]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}".removesuffix(".0")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, f"parts: {', '.join(PARTS)}\n\n{EXAMPLES}")
    text = "parts, see below; 8b@static: only transformers"
    parser.add_argument("parts", nargs="*", metavar="PART", help=text)
    parser.add_argument("--backend", choices=("cuda", "torch"), help="torch: the reference path")
    add_options(
        parser,
        ("--quick", False, f"{', '.join(QUICK)}; no peers"),
        ("--no-peers", False, "without transformers"),
        ("--together", False, "all our parts in one process"),
        ("--rounds", int, "rounds; the median counts (3; quick: 1)"),
        ("--device", "cuda"),
        ("--tiny", False, "tiny shapes, to test the benchmark itself"),
        ("--limit", 540.0, "seconds for all parts (%(default)s)"),
        ("--out", Path("bench-results/gpu")),
        (
            "--scratch",
            Path(tempfile.gettempdir()),
            "folder for 16 GB (%(default)s)",
        ),
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick or args.tiny else 3)
    args.backend = args.backend or ("cuda" if args.device.startswith("cuda") else "torch")
    args.parts = args.parts or list(QUICK if args.quick else FULL)
    if args.tiny and "server" in args.parts:  # it has one shape only
        args.parts.remove("server")
    for name in args.parts:
        key, mark, mode = name.partition("@")
        if key not in PARTS or (mark and mode not in PARTS[key].peers):
            parser.error(f"{name!r} is not one of {', '.join(PARTS)}")
    return args


def main() -> int:
    args = parse_arguments()
    bench = Bench(args)
    peers = not (args.no_peers or args.quick)
    for names in group_parts(args.parts, together=args.together or args.quick, peers=peers):
        bench.run(names)
    print("\n" + bench.write())
    return 1 if bench.results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
