"""Twins trained and measured on a GPU: python bench/twins_gpu.py [PART ...] --out FOLDER [--tiny]

write       texts that the causal model writes for its twins; kept in the cache, gone on with
block       A: the block-diffusion twin: perplexity bound over causal, agreement, tokens a pass
block-lora  the same as an adapter (rank 128), which the engine runs beside the model's own cache
fill        B: the whole-text twin, from block if that is there: holes, planted errors
draft       C: the drafting head: tokens a pass
sudoku      both twins at equal steps: boards solved by empty cells and by order
countdown   the same with Countdown-4

Each part is a run in FOLDER/runs. It is stopped, with a checkpoint, when --limit seconds are over,
and gone on with by the same command; when it is done it is measured, and its weights are put into
FOLDER/weights in 16 bits. results.json is written after every part. Nothing is fetched but what
--model and --data name.

    python bench/twins_gpu.py block --data books/ wiki.txt --minutes 12 --limit 540 --out out
    python bench/twins_gpu.py --tiny --out /tmp/try            does the bench itself work? no GPU
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch._dynamo

from twins.block import agreement, perplexities
from twins.draft import opened_head, tokens_a_pass
from twins.fill import holes, planted
from twins.models import Pair, held_out_batches, tiny_causal
from twins.puzzles import solved
from unspool.errors import ModelFileError
from unspool.train.export import export_folder
from unspool.train.running.events import Event, StepLogged
from unspool.train.running.runs import Run
from unspool.train.twins.data import CausalModel, load_sources
from unspool.train.twins.draft_head import open_head, save_head
from unspool.train.twins.settings import TwinSettings
from unspool.train.twins.twin import new_run, settings_of, train_twin

# Minutes of training in all, if nothing is said.
MINUTES = {"block": 12.0, "block-lora": 12.0, "fill": 8.0, "draft": 12.0, "sudoku": 8.0,
           "countdown": 8.0}  # fmt: skip
TINY: dict[str, Any] = {"steps": 3, "minutes": None, "chat": 8, "chat_tokens": 24, "batch": 4,
                        "length": 48, "draft_tokens": 64}  # fmt: skip
TINY_PUZZLE: dict[str, Any] = {"steps": 3, "minutes": None, "batch": 4, "depth": 1, "width": 16,
                               "heads": 2}  # fmt: skip
EMPTY = {
    "sudoku": ("sudoku:30", "sudoku:40", "sudoku:48", "sudoku:54"),
    "countdown": ("countdown",),
}


class UnfinishedError(Exception):
    """The time of this call is over; the same command goes on."""


class Job:
    """What was asked on the command line, and where it goes."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.out = given, given.out
        self.device = torch.device(given.device)
        self.until = time.monotonic() + given.limit if given.limit else None
        self.model, self.data = given.model, tuple(given.data)
        if given.tiny:
            self.model = str(tiny_causal(self.out / "tiny"))
            self.data = (str(self.out / "tiny" / "words.txt"),)

    def settings(self, kind: str, part: str, **changes: Any) -> TwinSettings:
        given = self.given
        wanted = TwinSettings(
            kind=kind, model=self.model, data=self.data, shares=tuple(given.share or ()),
            chat=given.chat, questions=given.questions, device=given.device, seed=given.seed,
            minutes=given.minutes or MINUTES.get(part, 8.0), batch=given.batch,
            length=given.length, rate=given.rate,
        )  # fmt: skip
        wanted = replace(wanted, **changes)
        tiny = TINY if kind in ("block", "fill", "draft") else TINY_PUZZLE
        return replace(wanted, **tiny) if given.tiny else wanted

    def trained(self, part: str, settings: TwinSettings) -> Run:
        """The part's run, finished; begun or gone on with if need be."""
        folder = self.out / "runs" / part
        if (folder / "run.json").exists():
            run = Run.open(folder)
            if run.state == "done":
                return run
            run.resume_here()
        else:
            run = new_run(settings, folder)

        def listen(event: Event) -> None:
            if not isinstance(event, StepLogged):
                return
            _tell(part, run, event)
            if self.until is not None and time.monotonic() > self.until:
                run.send_command("stop")

        train_twin(settings_of(run), run, listen, tell=lambda done: say(f"  {done} texts written"))
        if run.state != "done":
            raise UnfinishedError(f"{part}: stopped; the same command goes on")
        return run

    def keep(self, part: str, run: Run) -> None:
        """The weights, in 16 bits."""
        assert run.final is not None
        target = self.out / "weights" / part
        if (run.final / "model.safetensors").exists():
            export_folder(run.final, target, dtype="bfloat16", force=True)
            if (run.final / "twin.json").exists():
                shutil.copyfile(run.final / "twin.json", target / "twin.json")
            return
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(run.final, target, ignore=shutil.ignore_patterns("state"))

    def packed_head(self, part: str, run: Run, causal: CausalModel) -> Path:
        """A head as it is shipped: four bits a number, where its rows can be cut into blocks."""
        assert run.final is not None
        target = self.out / "weights" / part
        told = json.loads((run.final / "config.json").read_text())
        shape, weights = open_head(run.final)
        who = {"base": told["base"], "fingerprint": told["fingerprint"]}
        for kind in ("Q4_1", "F16"):
            try:
                save_head(weights, shape, causal.checkpoint.config, target, **who, type=kind)
                break
            except ModelFileError:
                continue
        return target


def say(line: str) -> None:
    print(line, flush=True)


def _tell(part: str, run: Run, event: StepLogged) -> None:
    if event.step % max(1, run.steps // 20) == 0 or event.step == 1:
        more = "".join(f", {name} {value:.3g}" for name, value in event.extra.items())
        memory = f", {event.memory / 2**30:.0f} GiB" if getattr(event, "memory", None) else ""
        say(
            f"  {part} {event.step}/{run.steps}: loss {event.loss:.4f}{more}, "
            f"{event.tokens_per_second:,.0f} tokens/s, {event.seconds:.0f} s{memory}"
        )


# -- the parts ------------------------------------------------------------------------------------


def write(job: Job) -> dict[str, Any]:
    settings = job.settings("block", "write")
    left = (job.until - time.monotonic()) / 60 if job.until else None
    settings = replace(settings, writing_minutes=left)
    since = time.monotonic()
    causal = CausalModel.open(job.model)
    _, _, told = load_sources(causal, settings, job.device, lambda done: say(f"  {done} texts"))
    return {**told, "seconds": time.monotonic() - since}


def _held_out(job: Job, settings: TwinSettings, causal: CausalModel, length: int, rows: int) -> Any:
    there = replace(settings, writing_minutes=0.0)  # nothing more is written now
    _, held_out, _ = load_sources(causal, there, job.device, lambda done: None)
    return held_out_batches(held_out, rows, length, 2, job.device)


def block(job: Job, part: str = "block", lora: int = 0) -> dict[str, Any]:
    settings = job.settings("block", part, lora=lora, alpha=float(lora) or None)
    run = job.trained(part, settings)
    job.keep(part, run)
    causal = CausalModel.open(job.model)
    assert run.final is not None
    pair = Pair.opened(causal, run.final, job.device)
    length, rows = (48, 4) if job.given.tiny else (512, 32)
    told: dict[str, Any] = {"steps": run.steps}
    for name, batches in _held_out(job, settings, causal, length, rows).items():
        told[name] = {**perplexities(pair, batches), **agreement(pair, batches)}
    return told


def fill(job: Job) -> dict[str, Any]:
    first = job.out / "runs" / "block"
    start = str(first) if (first / "final.json").exists() else None
    settings = job.settings("fill", "fill", start=start)
    run = job.trained("fill", settings)
    job.keep("fill", run)
    causal = CausalModel.open(job.model)
    assert run.final is not None
    pair = Pair.opened(causal, run.final, job.device)
    length, rows = (48, 4) if job.given.tiny else (160, 512)
    told: dict[str, Any] = {"steps": run.steps}
    for name, batches in _held_out(job, settings, causal, length, rows).items():
        told[name] = {"holes": holes(pair, batches[0]), "errors": planted(pair, batches[0])}
    return told


def draft(job: Job) -> dict[str, Any]:
    settings = job.settings(
        "draft", "draft", chat_share=1.0, data=(), shares=(), start=job.given.head
    )
    run = job.trained("draft", settings)
    causal = CausalModel.open(job.model)
    clean = causal.frozen(job.device)
    head = opened_head(clean, job.packed_head("draft", run, causal), job.device)
    length, rows = (48, 4) if job.given.tiny else (384, 32)
    found = _held_out(job, settings, causal, length, rows)
    measured = {name: tokens_a_pass(clean, head, batches) for name, batches in found.items()}
    return {"steps": run.steps, **measured}


def puzzle(job: Job, name: str) -> dict[str, Any]:
    """Both twins; the second has as many steps as the first came to in its time."""
    told: dict[str, Any] = {}
    steps = None
    for sight in ("whole", "causal"):
        given = job.given
        changes = {"sight": sight, "depth": given.depth, "width": given.width, "heads": given.heads}
        settings = job.settings(name, name, **changes)
        if steps is not None:
            settings = replace(settings, steps=steps, minutes=None)
        run = job.trained(f"{name}-{sight}", settings)
        steps = run.steps
        job.keep(f"{name}-{sight}", run)
        assert run.final is not None
        count = 2 if given.tiny else given.boards
        names = EMPTY[name][:1] if given.tiny else EMPTY[name]
        told[sight] = {
            "steps": steps, "parameters": run.facts["parameters"],
            "solved": solved(run.final, names, count, job.device),
        }  # fmt: skip
    return told


PARTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "write": write,
    "block": block,
    "block-lora": lambda job: block(job, "block-lora", 4 if job.given.tiny else 128),
    "fill": fill,
    "draft": draft,
    "sudoku": lambda job: puzzle(job, "sudoku"),
    "countdown": lambda job: puzzle(job, "countdown"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("twins-out"))
    parser.add_argument("--model", help="the causal model; default: the default model")
    parser.add_argument("--data", nargs="*", default=["sotu"], help="text besides its own")
    parser.add_argument("--share", nargs="*", type=float, help="of each of those")
    parser.add_argument("--chat", type=int, default=16000, help="texts that it writes itself")
    parser.add_argument("--questions", help="a file with one in each line")
    parser.add_argument("--minutes", type=float, help="of training, in all, for each part")
    parser.add_argument("--limit", type=float, help="seconds after which this call stops")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--depth", type=int, default=6, help="layers of puzzle twins")
    parser.add_argument("--width", type=int, default=224)
    parser.add_argument("--heads", type=int, default=7)
    parser.add_argument(
        "--boards", type=int, default=1000, help="puzzles to be solved of each kind"
    )
    parser.add_argument("--head", help="a folder: the drafting head that draft goes on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # each measure has masks of its own
    given.out.mkdir(parents=True, exist_ok=True)
    job, file = Job(given), given.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for part in given.parts or PARTS:
        say(f"{part}:")
        torch._dynamo.reset()  # what was compiled for one part is of no use to the next
        try:
            results[part] = PARTS[part](job)
        except UnfinishedError as error:
            say(str(error))
            break
        say(json.dumps(results[part], indent=1))
        file.write_text(json.dumps({**results, "torch": torch.__version__}, indent=2))


if __name__ == "__main__":
    main()
