"""The folder of a training run: what is in it, and reading it back. Needs no torch.

    run.json            what the run is: kind, state, settings, the model's config, the data's card
    log.jsonl           one line a logged step: step, tokens, loss, lr, tokens_per_second, ...
    samples.jsonl       texts that the model wrote on the way: step, prompt, seed, text
    checkpoints/000123/ whole model folders, loaded by `unspool.load` and by transformers
    final.json          the checkpoint that is the result, when the run is done: the best
    control.json        what somebody else wants of the run: {"want": "pause" | "go" | "stop"}

    for run in Run.all():
        print(run.name, run.state, run.log()[-1])
    Run.open("runs/speeches").ask("pause")

A run is changed only by the process that trains it; everybody else reads, and asks.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import UnspoolError
from unspool.model.run_folder import find_run, run_model, runs_folder
from unspool.train.running.atomic import write_json

KINDS = ("new", "tune", "dpo", "grpo", "twin")
STATES = ("running", "paused", "done", "failed", "stopped", "broken off")
WANTS = ("go", "pause", "stop")
FILM = (0, 1, 3, 10, 30, 100)  # per cent of the steps of which a checkpoint is always kept

_UNFINISHED = ("running", "paused")


class RunError(UnspoolError):
    """A run folder that is not there, or cannot be used as was asked."""


def film_steps(steps: int) -> tuple[int, ...]:
    """The steps whose checkpoints are kept to look back at the training as at a film."""
    return tuple(sorted({round(steps * share / 100) for share in FILM}))


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint of a run."""

    folder: Path
    step: int
    tokens: int
    held_out_loss: float | None
    resumable: bool  # whether the optimizer's state lies beside the weights


class Run:
    """One run folder; its facts are read from the disk whenever they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"<Run {self.folder}>"

    # -- finding and making -------------------------------------------------------------------

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """The run in a folder; a bare name is looked for among the runs."""
        path = find_run(folder)
        if path is None:
            raise RunError(f"{folder}: is no training run (it has no run.json); see: {_LIST}")
        return cls(path)

    @classmethod
    def all(cls, root: str | Path | None = None) -> list[Run]:
        """Every run below a folder that can be read, the newest first."""
        folder = Path(root) if root is not None else runs_folder()
        found = {}
        for path in sorted(folder.glob("*/run.json")):
            with suppress(RunError):
                run = cls(path.parent)
                found[run] = str(run.facts.get("started", ""))
        return sorted(found, key=lambda run: found[run], reverse=True)

    @classmethod
    def create(cls, folder: str | Path, kind: str, **facts: Any) -> Run:
        """A new run in a folder that must not have one yet."""
        path = Path(folder).expanduser()
        if (path / "run.json").exists():
            raise RunError(
                f"{path}: has a run already; go on with it (--resume), or give another --name"
            )
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the run's folder {path}: {error.strerror}") from None
        run = cls(path)
        first = {"name": path.name, "kind": kind, "state": "running", "started": _now()}
        write_json(path / "run.json", {**first, **process_facts(), **facts})
        return run

    @classmethod
    def free_folder(cls, name: str, root: str | Path | None = None) -> Path:
        """A folder for a new run called `name`, or `name-2`, ... if that is taken."""
        base = (Path(root) if root is not None else runs_folder()) / name
        folder, number = base, 1
        while folder.exists():
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
        return folder

    # -- reading ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says."""
        return read_json(self.folder / "run.json")

    @property
    def state(self) -> str:
        """One of STATES; a run that says it is going and whose process is gone is broken off."""
        facts = self.facts
        state = str(facts.get("state", "failed"))
        if state in _UNFINISHED and not _lives(facts.get("pid"), facts.get("pid_started")):
            return "broken off"
        return state

    @property
    def steps(self) -> int:
        """How many steps it is to have in all."""
        return int(self.facts.get("steps", 0))

    def log(self, since: int = 0) -> list[dict[str, Any]]:
        """The logged steps from line `since` on. A resumed run repeats no step: its lines after
        the checkpoint it goes on from are taken back."""
        return list(_lines(self.folder / "log.jsonl", since))

    def samples(self, since: int = 0) -> list[dict[str, Any]]:
        return list(_lines(self.folder / "samples.jsonl", since))

    def checkpoints(self) -> list[Saved]:
        """The whole ones, in the order of their steps."""
        found = []
        for path in (self.folder / "checkpoints").glob("[0-9]*"):
            with suppress(RunError):  # one that is being removed just now
                facts = read_json(path / "training.json")
                found.append(
                    Saved(
                        path,
                        int(facts["step"]),
                        int(facts["tokens"]),
                        facts.get("held_out_loss"),
                        (path / "state" / "state.json").exists(),
                    )
                )
        return sorted(found, key=lambda saved: saved.step)

    def resumable(self) -> Saved | None:
        """The newest checkpoint that training can go on from."""
        return next((saved for saved in reversed(self.checkpoints()) if saved.resumable), None)

    @property
    def final(self) -> Path | None:
        """The folder of the finished model."""
        if not (self.folder / "final.json").exists():
            return None
        return self.folder / str(read_json(self.folder / "final.json")["checkpoint"])

    @property
    def model(self) -> Path | None:
        """The checkpoint to generate with: the best on held-out text, else the newest."""
        return run_model(self.folder)

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the lowest held-out loss; None without evaluations."""
        evaluated = [saved for saved in self.checkpoints() if saved.held_out_loss is not None]
        best = min(evaluated, key=lambda saved: (saved.held_out_loss, -saved.step), default=None)
        return None if best is None else best.step

    # -- asking -------------------------------------------------------------------------------

    def ask(self, want: str) -> None:
        """Ask the process that trains to pause, go on or stop; it looks once a step."""
        if want not in WANTS:
            raise RunError(f"a run can be asked to {', '.join(WANTS)}, not {want!r}")
        state = self.state
        if state not in _UNFINISHED:
            raise RunError(f"{self.name} is {state}; only a run that is going can be asked")
        write_json(self.folder / "control.json", {"want": want})

    def wanted(self) -> str:
        """What somebody asked for last."""
        with suppress(RunError):
            want = str(read_json(self.folder / "control.json").get("want"))
            return want if want in WANTS else "go"
        return "go"

    # -- what the process that trains writes --------------------------------------------------

    def update(self, **facts: Any) -> None:
        write_json(self.folder / "run.json", {**self.facts, **facts})

    def take_over(self, **facts: Any) -> None:
        """Go on with the run in this process."""
        if self.state in _UNFINISHED:
            raise RunError(
                f"{self.name} is going already, in process {self.facts.get('pid')}; stop it first"
            )
        (self.folder / "control.json").unlink(missing_ok=True)
        self.update(
            **{"state": "running", "error": None, "signal": None}, **process_facts(), **facts
        )

    def discard_if_empty(self) -> None:
        """Delete the folder of a run that was refused before its first step."""
        if not self.log() and not self.checkpoints():
            shutil.rmtree(self.folder, ignore_errors=True)

    def write_log(self, line: Mapping[str, Any]) -> None:
        _append(self.folder / "log.jsonl", line)

    def write_sample(self, line: Mapping[str, Any]) -> None:
        _append(self.folder / "samples.jsonl", line)

    def forget_after(self, step: int) -> None:
        """Take back what was logged behind a step, because it will be computed again."""
        for name in ("log.jsonl", "samples.jsonl"):
            path = self.folder / name
            if not path.exists():
                continue
            kept = [line for line in _lines(path, 0) if line.get("step", 0) <= step]
            part = path.with_name(f".{name}.part")
            part.write_text("".join(map(_as_line, kept)), encoding="utf-8")
            part.replace(path)


_LIST = "unspool train runs"


def process_facts() -> dict[str, Any]:
    """Who trains: enough to tell later whether that process still lives."""
    pid = os.getpid()
    return {"pid": pid, "pid_started": began(pid), "versions": _versions()}


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "numpy"):
        if name in sys.modules:
            found[name] = str(sys.modules[name].__version__)
    return found


def began(pid: int) -> int | None:
    """When a process began, in the system's own count: another one with its number began later."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])  # Z: ended, and nobody has asked yet


def _lives(pid: object, started: object) -> bool:
    if not isinstance(pid, int):
        return False
    if Path("/proc/self/stat").exists():
        return started is not None and began(pid) == started
    if os.name != "nt":  # where this would end the process
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
    return True


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is missing; this is no whole training run") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); it is damaged") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} does not hold what it should; it is damaged")
    return content


def _lines(path: Path, since: int) -> Iterator[dict[str, Any]]:
    """The whole lines; the last may be half written by a process that was killed."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number < since or not line.endswith("\n"):
                continue
            with suppress(ValueError):
                yield json.loads(line)


def _as_line(content: Mapping[str, Any]) -> str:
    """One line of JSON, which has no place for NaN and infinity: they are left out."""
    finite = {
        key: value
        for key, value in content.items()
        if not isinstance(value, float) or math.isfinite(value)
    }
    return json.dumps(finite, ensure_ascii=False) + "\n"


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_as_line(line))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
