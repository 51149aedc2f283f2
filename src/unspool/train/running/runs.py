"""The folder of a training run. Needs no torch.

    run.json            kind, state, settings, model config, statistics of the data
    log.jsonl           one line per logged step: step, tokens, loss, lr, tokens_per_second, ...
    samples.jsonl       texts generated during training: step, prompt, seed, text
    checkpoints/000123/ model folders for `unspool.load` and transformers
    final.json          the resulting checkpoint of a finished run: the best one
    control.json        command of another process: pause, go or stop

    for run in Run.all():
        print(run.name, run.state, run.log()[-1])
    Run.open("runs/speeches").ask("pause")

Only the training process writes a run folder; other processes read it, and request changes through
control.json.
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
from unspool.model.hub.find import find_run, run_model, runs_folder


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file; a reader sees either the old or the new content."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Sync all files and folders below a folder to disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, so that a rename survives a crash."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


KINDS = ("new", "tune", "dpo", "grpo", "twin")
COMMANDS = ("go", "pause", "stop")
MILESTONES = (0, 1, 3, 10, 30, 100)  # percent of the steps; these checkpoints are always kept

_UNFINISHED = ("running", "paused")


class RunError(UnspoolError):
    """A run folder is missing, damaged, or in the wrong state."""


def milestone_steps(steps: int) -> tuple[int, ...]:
    """The steps whose checkpoints are always kept, to compare the model over the training."""
    return tuple(sorted({round(steps * percent / 100) for percent in MILESTONES}))


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint of a run."""

    folder: Path
    step: int
    tokens: int
    held_out_loss: float | None
    resumable: bool  # whether it includes the optimizer state


class Run:
    """One run folder. Properties read the disk on every access."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"<Run {self.folder}>"

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open a run by its folder, or by its name among the runs."""
        path = find_run(folder)
        if path is None:
            raise RunError(
                f"{folder}: not a training run (no run.json); list them with: unspool train runs"
            )
        return cls(path)

    @classmethod
    def all(cls, root: str | Path | None = None) -> list[Run]:
        """All readable runs in a folder, newest first."""
        folder = Path(root) if root is not None else runs_folder()
        start_times = {}
        for path in sorted(folder.glob("*/run.json")):
            with suppress(RunError):
                run = cls(path.parent)
                start_times[run] = str(run.facts.get("started", ""))
        return sorted(start_times, key=lambda run: start_times[run], reverse=True)

    @classmethod
    def create(cls, folder: str | Path, kind: str, **facts: Any) -> Run:
        """Create a run in a folder that does not have one; `facts` go into run.json."""
        path = Path(folder).expanduser()
        if (path / "run.json").exists():
            raise RunError(
                f"{path}: has a run already; continue it with --resume, or give another --name"
            )
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create the run folder {path}: {error.strerror}") from None
        run = cls(path)
        first = {"name": path.name, "kind": kind, "state": "running", "started": _now()}
        write_json(path / "run.json", {**first, **process_facts(), **facts})
        return run

    @classmethod
    def free_folder(cls, name: str, root: str | Path | None = None) -> Path:
        """An unused folder for a run: `name`, or `name-2`, `name-3`, ..."""
        base = (Path(root) if root is not None else runs_folder()) / name
        folder, number = base, 1
        while folder.exists():
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
        return folder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def facts(self) -> dict[str, Any]:
        """Content of run.json."""
        return read_json(self.folder / "run.json")

    @property
    def state(self) -> str:
        """One of STATES; "broken off": the process of an unfinished run has died."""
        facts = self.facts
        state = str(facts.get("state", "failed"))
        if state in _UNFINISHED and not _is_alive(facts.get("pid"), facts.get("pid_started")):
            return "broken off"
        return state

    @property
    def steps(self) -> int:
        """Planned number of steps."""
        return int(self.facts.get("steps", 0))

    def log(self, since: int = 0) -> list[dict[str, Any]]:
        """StepLogged steps from line `since` on.

        Resuming removes the lines after the checkpoint, so no step occurs twice.
        """
        return list(_read_lines(self.folder / "log.jsonl", since))

    def samples(self, since: int = 0) -> list[dict[str, Any]]:
        return list(_read_lines(self.folder / "samples.jsonl", since))

    def checkpoints(self) -> list[CheckpointInfo]:
        """All complete checkpoints, by step."""
        checkpoints = []
        for path in (self.folder / "checkpoints").glob("[0-9]*"):
            with suppress(RunError):  # being deleted right now
                facts = read_json(path / "training.json")
                checkpoints.append(
                    CheckpointInfo(
                        path,
                        int(facts["step"]),
                        int(facts["tokens"]),
                        facts.get("held_out_loss"),
                        (path / "state" / "state.json").exists(),
                    )
                )
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    def resumable_checkpoint(self) -> CheckpointInfo | None:
        """The newest checkpoint that training can resume from."""
        return next((c for c in reversed(self.checkpoints()) if c.resumable), None)

    @property
    def final(self) -> Path | None:
        """Folder of the finished model; None before the run is done."""
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
        evaluated = [c for c in self.checkpoints() if c.held_out_loss is not None]
        best = min(evaluated, key=lambda c: (c.held_out_loss, -c.step), default=None)
        return None if best is None else best.step

    def send_command(self, command: str) -> None:
        """Ask the training process to `pause`, `go` on or `stop`; it checks once per step."""
        if command not in COMMANDS:
            raise RunError(f"unknown command {command!r}; a run accepts {', '.join(COMMANDS)}")
        state = self.state
        if state not in _UNFINISHED:
            raise RunError(f"{self.name} is {state}; only a running training accepts commands")
        write_json(self.folder / "control.json", {"want": command})

    def requested_command(self) -> str:
        """The last command of `ask`; `go` if there is none."""
        with suppress(RunError):
            command = str(read_json(self.folder / "control.json").get("want"))
            return command if command in COMMANDS else "go"
        return "go"

    def update(self, **facts: Any) -> None:
        write_json(self.folder / "run.json", {**self.facts, **facts})

    def resume_here(self, **facts: Any) -> None:
        """Continue the run in this process."""
        if self.state in _UNFINISHED:
            raise RunError(
                f"{self.name} is already running in process {self.facts.get('pid')}; stop it first"
            )
        (self.folder / "control.json").unlink(missing_ok=True)
        self.update(
            **{"state": "running", "error": None, "signal": None}, **process_facts(), **facts
        )

    def discard_if_empty(self) -> None:
        """Delete the folder of a run that failed before its first step."""
        if not self.log() and not self.checkpoints():
            shutil.rmtree(self.folder, ignore_errors=True)

    def write_log(self, line: Mapping[str, Any]) -> None:
        _append(self.folder / "log.jsonl", line)

    def write_sample(self, line: Mapping[str, Any]) -> None:
        _append(self.folder / "samples.jsonl", line)

    def truncate_logs(self, step: int) -> None:
        """Remove the log lines after a step, which will be computed again."""
        for name in ("log.jsonl", "samples.jsonl"):
            path = self.folder / name
            if not path.exists():
                continue
            lines = [line for line in _read_lines(path, 0) if line.get("step", 0) <= step]
            part = path.with_name(f".{name}.part")
            part.write_text("".join(map(_as_line, lines)), encoding="utf-8")
            part.replace(path)


def process_facts() -> dict[str, Any]:
    """Identity of this process, enough to check later whether it is still alive."""
    pid = os.getpid()
    return {"pid": pid, "pid_started": process_start_time(pid), "versions": _versions()}


def _versions() -> dict[str, str]:
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "numpy"):
        if name in sys.modules:
            versions[name] = str(sys.modules[name].__version__)
    return versions


def process_start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks, which tells it from a later one with its pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])  # Z: a zombie


def _is_alive(pid: object, started: object) -> bool:
    if not isinstance(pid, int):
        return False
    if Path("/proc/self/stat").exists():
        return started is not None and process_start_time(pid) == started
    if os.name != "nt":  # there, os.kill would end the process
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
        raise RunError(f"{path} is missing; the training run is incomplete") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); it is damaged") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is not a JSON object; it is damaged")
    return content


def _read_lines(path: Path, since: int) -> Iterator[dict[str, Any]]:
    """Yield the complete lines; a killed process may have left half a line at the end."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number < since or not line.endswith("\n"):
                continue
            with suppress(ValueError):
                yield json.loads(line)


def _as_line(content: Mapping[str, Any]) -> str:
    """One line of JSON, without NaN and infinity, which JSON cannot express."""
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
