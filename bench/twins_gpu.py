"""Twins trained and measured on a GPU: python bench/twins_gpu.py [PART ...] --out FOLDER [--tiny]

write       texts that the causal model writes for its twins; cached, and resumed
block       block-diffusion twin: perplexity bound relative to causal, agreement, tokens per pass
block-lora  the same as an adapter (rank 128), which the engine runs with the model's own cache
fill        bidirectional twin, from block if that exists: holes, planted errors
sudoku      both kinds of twin with equal steps: boards solved by empty cells and by order
countdown   the same with Countdown-4

Each part is a run in FOLDER/runs. After --limit seconds it stops with a checkpoint, and the same
command resumes it. A finished run is measured, and its weights are stored in FOLDER/weights in 16
bits. results.json is written after every part. Only --model and --data are downloaded.

    python bench/twins_gpu.py block --data books/ wiki.txt --minutes 12 --limit 540 --out out
    python bench/twins_gpu.py --tiny --out /tmp/try     test of the benchmark itself, without a GPU
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from lib.arguments import add_options, make_parser, one_of
from lib.models import tiny_causal
from twins.measures import (
    Pair,
    block_agreement,
    block_perplexities,
    fill_holes,
    find_errors,
    held_out_batches,
    solve_puzzles,
)
from unspool.train.export import export_folder
from unspool.train.running.events import Event, StepLogged
from unspool.train.running.runs import Run
from unspool.train.twins.data import CausalModel, load_sources
from unspool.train.twins.settings import TwinSettings
from unspool.train.twins.twin import new_run, settings_of, train_twin

MINUTES = {"block": 12.0, "block-lora": 12.0}  # of training; others 8
TINY: dict[str, Any] = {"steps": 3, "minutes": None, "chat": 8, "chat_tokens": 24, "batch": 4,
                        "length": 48}  # fmt: skip
TINY_PUZZLE: dict[str, Any] = {"steps": 3, "minutes": None, "batch": 4, "depth": 1, "width": 16,
                               "heads": 2}  # fmt: skip
PUZZLES = {
    "sudoku": ("sudoku:30", "sudoku:40", "sudoku:48", "sudoku:54"),
    "countdown": ("countdown",),
}


class UnfinishedError(Exception):
    """The time limit was reached; the same command resumes."""


class Job:
    """The arguments, the causal model and the output folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.device = torch.device(args.device)
        self.deadline = time.monotonic() + args.limit if args.limit else None
        self.model, self.data = args.model, tuple(args.data)
        if args.tiny:
            self.model = str(tiny_causal(self.out / "tiny"))
            self.data = (str(self.out / "tiny" / "words.txt"),)

    def settings(self, kind: str, part: str, **changes: Any) -> TwinSettings:
        args = self.args
        settings = TwinSettings(
            kind=kind, model=self.model, data=self.data, shares=tuple(args.share or ()),
            chat=args.chat, questions=args.questions, device=args.device, seed=args.seed,
            minutes=args.minutes or MINUTES.get(part, 8.0), batch=args.batch,
            length=args.length, rate=args.rate,
        )  # fmt: skip
        if args.tiny:
            changes |= TINY_PUZZLE if kind in PUZZLES else TINY
        return replace(settings, **changes)

    def train(self, part: str, settings: TwinSettings) -> tuple[Run, Path]:
        """Start, resume or reuse the part's run; return it when it is done, and its weights."""
        folder = self.out / "runs" / part
        if (folder / "run.json").exists():
            run = Run.open(folder)
            if run.state != "done":
                run.resume_here()
        else:
            run = new_run(settings, folder)

        def listen(event: Event) -> None:
            if isinstance(event, StepLogged):
                log_step(part, run, event)
                if self.deadline is not None and time.monotonic() > self.deadline:
                    run.send_command("stop")

        if run.state != "done":
            train_twin(settings_of(run), run, listen, on_text=lambda n: say(f"  {n} texts written"))
        if run.state != "done":
            raise UnfinishedError(f"{part}: stopped; the same command resumes")
        assert run.final is not None
        return run, run.final

    def store(self, part: str, weights: Path) -> None:
        """Store the weights in 16 bits."""
        target = self.out / "weights" / part
        if (weights / "model.safetensors").exists():
            export_folder(weights, target, dtype="bfloat16", force=True)
            if (weights / "twin.json").exists():
                shutil.copyfile(weights / "twin.json", target / "twin.json")
            return
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(weights, target, ignore=shutil.ignore_patterns("state"))

    def held_out(
        self, settings: TwinSettings, causal: CausalModel, length: int, rows: int
    ) -> dict[str, Any]:
        length, rows = (48, 4) if self.args.tiny else (length, rows)
        settings = replace(settings, writing_minutes=0.0)  # use the cached texts only
        _, sources, _ = load_sources(causal, settings, self.device, lambda count: None)
        return held_out_batches(sources, rows, length, 2, self.device)


def say(line: str) -> None:
    print(line, flush=True)


def log_step(part: str, run: Run, event: StepLogged) -> None:
    if event.step % max(1, run.steps // 20) == 0 or event.step == 1:
        extra = "".join(f", {name} {value:.3g}" for name, value in event.extra.items())
        memory = f", {event.memory / 2**30:.0f} GiB" if getattr(event, "memory", None) else ""
        say(
            f"  {part} {event.step}/{run.steps}: loss {event.loss:.4f}{extra}, "
            f"{event.tokens_per_second:,.0f} tokens/s, {event.seconds:.0f} s{memory}"
        )


# -- parts -----------------------------------------------------------------------------------------


def write(job: Job) -> dict[str, Any]:
    minutes = (job.deadline - time.monotonic()) / 60 if job.deadline else None
    settings = replace(job.settings("block", "write"), writing_minutes=minutes)
    start = time.monotonic()
    causal = CausalModel.open(job.model)
    _, _, facts = load_sources(causal, settings, job.device, lambda n: say(f"  {n} texts"))
    return {**facts, "seconds": time.monotonic() - start}


def block(job: Job, part: str = "block", lora: int = 0) -> dict[str, Any]:
    settings = job.settings("block", part, lora=lora, alpha=float(lora) or None)
    run, weights = job.train(part, settings)
    job.store(part, weights)
    causal = CausalModel.open(job.model)
    pair = Pair.open(causal, weights, job.device)
    results: dict[str, Any] = {"steps": run.steps}
    for name, batches in job.held_out(settings, causal, 512, 32).items():
        results[name] = {**block_perplexities(pair, batches), **block_agreement(pair, batches)}
    return results


def fill(job: Job) -> dict[str, Any]:
    first = job.out / "runs" / "block"
    start = str(first) if (first / "final.json").exists() else None
    settings = job.settings("fill", "fill", start=start)
    run, weights = job.train("fill", settings)
    job.store("fill", weights)
    causal = CausalModel.open(job.model)
    pair = Pair.open(causal, weights, job.device)
    results: dict[str, Any] = {"steps": run.steps}
    for name, (batch, *_) in job.held_out(settings, causal, 160, 512).items():
        results[name] = {"holes": fill_holes(pair, batch), "errors": find_errors(pair, batch)}
    return results


def puzzle(job: Job, name: str) -> dict[str, Any]:
    """Both twins; the second trains as many steps as the first did in its time."""
    args, results, steps = job.args, dict[str, Any](), None
    for sight in ("whole", "causal"):
        shape = {"depth": args.depth, "width": args.width, "heads": args.heads}
        settings = job.settings(name, name, sight=sight, **shape)
        if steps is not None:
            settings = replace(settings, steps=steps, minutes=None)
        run, weights = job.train(f"{name}-{sight}", settings)
        steps = run.steps
        job.store(f"{name}-{sight}", weights)
        count, names = (2, PUZZLES[name][:1]) if args.tiny else (args.boards, PUZZLES[name])
        results[sight] = {
            "steps": steps, "parameters": run.facts["parameters"],
            "solved": solve_puzzles(weights, names, count, job.device),
        }  # fmt: skip
    return results


PARTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "write": write,
    "block": block,
    "block-lora": lambda job: block(job, "block-lora", 4 if job.args.tiny else 128),
    "fill": fill,
    "sudoku": lambda job: puzzle(job, "sudoku"),
    "countdown": lambda job: puzzle(job, "countdown"),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*", type=one_of(PARTS), help=", ".join(PARTS))
    parser.add_argument("--data", nargs="*", default=["sotu"], help="texts besides its own")
    parser.add_argument("--share", nargs="*", type=float, help="share of each of those")
    add_options(
        parser,
        ("--out", Path("twins-out")),
        ("--model", str, "causal model; default: the default model"),
        ("--chat", 16000, "texts that the model writes itself"),
        ("--questions", str, "file with one question per line"),
        ("--minutes", float, "of training, for each part"),
        ("--limit", float, "stop this call after this many seconds"),
        ("--batch", int),
        ("--length", int),
        ("--rate", float),
        ("--depth", 6, "layers of puzzle twins"),
        ("--width", 224),
        ("--heads", 7),
        ("--boards", 1000, "puzzles of each kind to solve"),
        ("--seed", 0),
        ("--device", "cuda" if torch.cuda.is_available() else "cpu"),
        ("--tiny", False),
    )
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # each measure has other masks
    args.out.mkdir(parents=True, exist_ok=True)
    job, file = Job(args), args.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for part in args.parts or PARTS:
        say(f"{part}:")
        torch._dynamo.reset()  # compiled code of one part is useless for the next
        try:
            results[part] = PARTS[part](job)
        except UnfinishedError as error:
            say(str(error))
            break
        say(json.dumps(results[part], indent=1))
        file.write_text(json.dumps({**results, "torch": torch.__version__}, indent=2))


if __name__ == "__main__":
    main()
