"""Us on a GPU, beside the device's limit and transformers: python bench/gpu.py [PART ...] [--quick]

Random weights of three shapes (Llama 8B, SmolLM 135M, Qwen3 0.6B), everything through the public
API (`lm.stream` with a seed for each text), nothing downloaded. The first thing measured is what
the device can do: bytes read a second, and a product of bfloat16 matrices. A part's limit is the
larger of its bytes over the one and its operations over the other; what is told is the share of it.

one text   a prompt, then tokens a second behind the first one
many       requests handed in at once: new tokens a second of all, reading the prompts included;
           eight of the texts are written once more, alone, and compared
first      seconds from the request to its first token, as a share of the least they could be
server     tokens a second that reach the clients of `unspool serve`, see bench/serve.py
load       seconds from `unspool.load` of a checkpoint on the disk, beside plainly reading it
peers      transformers: a static cache and compiled decoding, and continuous batching

Each model runs in a process of its own; a part that fails or takes too long is named, and the rest
goes on. Writes table.md and results.json into --out after every part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpus.parts import FULL, PARTS, QUICK
from gpus.report import line, markdown

ROOT = Path(__file__).parent.parent
EXAMPLES = """examples:
  python bench/gpu.py                        the whole table, about 8 minutes on an H200
  python bench/gpu.py --quick                the three shapes, without transformers: under a minute
  python bench/gpu.py 8b 8b-2300 --no-peers
  python bench/gpu.py 0.6b --backend torch   the plain path, to compare with
  python bench/gpu.py --tiny --device cpu    does the bench itself work? no GPU needed"""


class Bench:
    """One run: what was found, and why the rest was not."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.results: dict[str, Any] = {
            "versions": versions(), "limits": None, "parts": {}, "failed": {},
        }  # fmt: skip
        self.until = time.monotonic() + given.limit

    def run(self, names: list[str]) -> None:
        """Parts in one process; after one that ended it, the rest in a new one."""
        while names:
            left = self.until - time.monotonic()
            if left < 5:
                self.results["failed"].update(dict.fromkeys(names, "no time was left"))
                return
            names = self._process(names)

    def command(self, names: list[str]) -> list[str]:
        """What measures these parts, and tells of each in a line."""
        return [sys.executable, __file__, "--worker", *worker_options(self.given), *names]

    def _process(self, names: list[str]) -> list[str]:
        """What is still to be done when the process has ended."""
        process = subprocess.Popen(
            self.command(names),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            text=True,
        )
        assert process.stdout is not None
        current, timer, why = names[0], self._timer(process, names[0]), "its process ended"
        for said in process.stdout:
            told = json.loads(said)
            current = told["part"]
            timer.cancel()
            if "begin" in told:
                timer = self._timer(process, current)
                continue
            names = names[names.index(current) + 1 :]
            self._note(current, told)
            timer = self._timer(process, names[0] if names else current)
        timer.cancel()
        code = process.wait()
        if names and code:
            if code == -9:
                why = "it took too long, or memory ended"
            lost = names[0]
            self.results["failed"].setdefault(lost, f"{why} (exit status {code})")
            print(f"{lost}: {self.results['failed'][lost]}", flush=True)
            return names[1:]
        return []

    def _timer(self, process: subprocess.Popen[str], name: str) -> threading.Timer:
        part = PARTS.get(name.partition("@")[0])
        most = min(part.seconds if part else 60.0, self.until - time.monotonic())
        timer = threading.Timer(max(most, 1), process.kill)
        timer.daemon = True
        timer.start()
        return timer

    def _note(self, name: str, told: dict[str, Any]) -> None:
        if "error" in told:
            self.results["failed"][name] = told["error"]
            print(f"{name}: {told['error']}", flush=True)
        elif name == "limits":
            self.results["limits"] = told["result"]
            print(line(name, told["result"], None), flush=True)
        else:
            self.results["parts"][name] = told["result"]
            print(line(name, told["result"], self.results["limits"]), flush=True)
        self.write()

    def write(self) -> None:
        self.given.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.results, indent=1) + "\n"
        (self.given.out / "results.json").write_text(text, encoding="utf-8")
        (self.given.out / "table.md").write_text(markdown(self.results), encoding="utf-8")


def groups(names: list[str], *, together: bool, peers: bool) -> list[list[str]]:
    """Which parts share a process: those of one model; transformers' come last."""
    mine: dict[Any, list[str]] = {}
    for name in names:
        if "@" in name:
            continue
        part = PARTS[name]
        own = part.work in ("load", "server")  # these load the model themselves
        mine.setdefault("all" if together else (part.model, own), []).append(name)
    theirs: dict[str, list[str]] = {}
    for name in names:
        key, _, only = name.partition("@")
        for way in (only,) if only else PARTS[key].peers if peers else ():
            theirs.setdefault(PARTS[key].shape + way, []).append(f"{key}@{way}")
    return [["limits"], *mine.values(), *theirs.values()]


def versions() -> str:
    from importlib import metadata

    found = []
    for package in ("torch", "triton", "transformers"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def worker_options(given: argparse.Namespace) -> list[str]:
    chosen = ["--device", given.device, "--backend", given.backend, "--rounds", str(given.rounds)]
    return [*chosen, "--scratch", str(given.scratch), *(["--tiny"] if given.tiny else [])]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"parts: {', '.join(PARTS)}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="of those below; all but two; 8b@static: of transformers only",
    )
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)}; no peers")
    parser.add_argument("--no-peers", action="store_true", help="without transformers")
    parser.add_argument("--together", action="store_true", help="all our parts in one process")
    parser.add_argument("--rounds", type=int, help="of which the median counts (3; quick: 1)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", choices=("cuda", "torch"), help="torch: the plain path")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the bench itself")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench-results/gpu"), metavar="FOLDER")
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()), metavar="FOLDER",
        help="for a checkpoint of 16 GB, on the disk to be measured (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick or given.tiny else 3)
    given.backend = given.backend or ("cuda" if given.device.startswith("cuda") else "torch")
    given.parts = given.parts or list(QUICK if given.quick else FULL)
    if given.tiny and "server" in given.parts:  # it has one shape only
        given.parts.remove("server")
    for name in given.parts if not given.worker else ():
        key, at, way = name.partition("@")
        if key not in PARTS or (at and way not in PARTS[key].peers):
            parser.error(f"{name!r} is not one of {', '.join(PARTS)}")
    return given


def main() -> int:
    given = arguments()
    if given.worker:
        from gpus import worker

        worker.main(given)
    bench = Bench(given)
    peers = not (given.no_peers or given.quick)
    for names in groups(given.parts, together=given.together or given.quick, peers=peers):
        bench.run(names)
    bench.write()
    print("\n" + markdown(bench.results))
    return 1 if bench.results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
