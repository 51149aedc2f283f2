"""`/v1/runs`: training runs of a server, as JSON, live, and their checkpoints as models."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from unspool.errors import DataError, UnspoolError
from unspool.model.hub.find import runs_folder
from unspool.server.http.errors import ApiError, bad_request
from unspool.server.http.events import EventStream, error_event, event, writer_from
from unspool.server.http.middleware import CancelOnDisconnect
from unspool.server.http.replies import JsonReply, new_router
from unspool.server.runtime.registry import ModelEntry, ephemeral_entry
from unspool.server.runtime.schema import Seed, Strict
from unspool.server.runtime.state import ServerState, state_of
from unspool.server.runtime.threads import in_thread
from unspool.train.running.runs import KINDS, Run, milestone_steps

# -- The training runs of a server, by name, and their checkpoints as models
#
# A checkpoint is a model named `RUN@STEP`: it is loaded on the first request and evicted when
# memory is needed. It is not listed in `/v1/models`.


def run_library(state: ServerState) -> RunLibrary:
    """The training runs of a server."""
    return state.extension("runs", lambda: RunLibrary(state.settings.runs))


def find_checkpoint(state: ServerState, name: str) -> ModelEntry | None:
    """The checkpoint that a model name such as `RUN@STEP` means."""
    return run_library(state).checkpoint(name)


class RunLibrary:
    """The runs in one folder. A path is never built from more than one plain name."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (runs_folder() if root is None else root).absolute()

    def all(self) -> list[Run]:
        return [run for run in Run.all(self.root) if self._is_inside(run.folder)]

    def get(self, name: str) -> Run:
        """The run of this name. Raises 404 if there is none, or it is outside the root."""
        folder = self.root / name
        is_plain = name not in ("", ".", "..") and name.isprintable() and Path(name).name == name
        if not is_plain or not path_exists(folder / "run.json") or not self._is_inside(folder):
            message = f"there is no training run {name[:100]!r} in {self.root}"
            raise ApiError(404, message, param="run", code="run_not_found")
        return Run(folder)

    def checkpoint(self, model: str) -> ModelEntry | None:
        """The checkpoint `RUN@STEP`; None if the name has another form, or there is none."""
        name, _, step = model.rpartition("@")
        if not name or not (step.isascii() and step.isdecimal()) or len(step) > 12:
            return None
        try:
            checkpoints = self.get(name).checkpoints()
        except (UnspoolError, ApiError):
            return None
        checkpoint = next((saved for saved in checkpoints if saved.step == int(step)), None)
        if checkpoint is None or not self._is_inside(checkpoint.folder):
            return None
        return ephemeral_entry(f"{name}@{checkpoint.step}", checkpoint.folder, "training")

    def _is_inside(self, folder: Path) -> bool:
        """Whether the folder is inside the root after following links."""
        return folder.resolve().is_relative_to(self.root.resolve())


def path_exists(path: Path) -> bool:
    """`Path.exists`; False for names that are too long for the file system."""
    with suppress(OSError):
        return path.exists()
    return False


# -- Training runs as JSON: settings, progress and checkpoints

MAX_LINES = 4000  # of a log in one response: more points than there are pixels
_TAIL_BYTES = 1 << 14  # always holds the last line of a log
_HIDDEN = ("pid", "pid_started")


def summary(run: Run, fault: str | None = None) -> dict[str, Any]:
    """A run in a list. `fault`: why its process failed, if this server started it."""
    facts = run.facts
    return {
        "name": run.name,
        "object": "training.run",
        "kind": facts.get("kind"),
        "state": run.state,
        "error": facts.get("error") or fault,
        "started": facts.get("started"),
        "steps": run.steps,
        "last": last_line(run.folder / "log.jsonl"),
    }


def run_json(run: Run, fault: str | None = None) -> dict[str, Any]:
    """A run without its log and samples."""
    facts = {name: value for name, value in run.facts.items() if name not in _HIDDEN}
    steps = run.steps
    film = milestone_steps(steps)
    checkpoints = [
        {
            "step": saved.step,
            "tokens": saved.tokens,
            "held_out_loss": saved.held_out_loss,
            "film": saved.step in film,
            "model": f"{run.name}@{saved.step}",
        }
        for saved in run.checkpoints()
    ]
    can_resume = run.resumable_checkpoint() is not None
    return {
        **summary(run, fault),
        "facts": facts,
        "checkpoints": checkpoints,
        "can_resume": can_resume,
    }


def last_line(path: Path) -> dict[str, Any] | None:
    """The newest step of a log, without reading all of it."""
    lines: list[dict[str, Any]] = []
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        for line in file.read().rpartition(b"\n")[0].split(b"\n"):
            with suppress(ValueError):  # the first may be incomplete
                lines.append(dict(json.loads(line)))
    return merge_by_step(lines)[-1] if lines else None


def merge_by_step(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each step; its evaluation is logged in a separate line."""
    by_step: dict[Any, dict[str, Any]] = {}
    for line in lines:
        by_step.setdefault(line.get("step"), {}).update(line)
    return list(by_step.values())


def downsample(lines: list[dict[str, Any]], max_lines: int = MAX_LINES) -> list[dict[str, Any]]:
    """One line for each step, and at most about `max_lines` of them: every n-th, those with a
    held-out loss, and the last."""
    lines = merge_by_step(lines)
    every = -(-len(lines) // max_lines) if lines else 1
    last = len(lines) - 1
    return [
        line
        for number, line in enumerate(lines)
        if number % every == 0 or number == last or line.get("held_out_loss") is not None
    ]


# -- Training started by this server: `unspool train` as a child process, one at a time

ACTIVE = ("running", "paused")
_OUTPUT_BYTES = 2000  # of a failed process that are read for its message


def server_trainer(state: ServerState) -> ServerTrainer:
    """The trainer of a server."""
    return state.extension("trainer", lambda: ServerTrainer(run_library(state)))


class ServerTrainer:
    """Starts training processes, and knows the last one."""

    def __init__(self, runs: RunLibrary) -> None:
        self.runs = runs
        self.name: str | None = None  # of the last run started
        self._starting = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "unspool", "train"]

    def trains(self, name: str | None) -> bool:
        """Whether the process for this run was started here and has not ended."""
        is_alive = self._process is not None and self._process.poll() is None
        return is_alive and name == self.name

    def check_free(self) -> None:
        """Raise 409 if a run is active: two would share the cores and both be slow."""
        active = [run.name for run in self.runs.all() if run.state in ACTIVE]
        if self.name is not None and self.trains(self.name):
            active.append(self.name)
        if active:
            message = f"{active[0]} is being trained; stop it, or wait until it is done"
            raise ApiError(409, message, code="training_busy")

    @staticmethod
    def check_source(source: str) -> None:
        """Raise if there is no such data. The default data set is downloaded here, so that an
        unreachable network is an error; a data set of the hub is downloaded by the training."""
        from unspool.train.data.sources import DEFAULT_SOURCE, source_files

        try:
            source_files(source, offline=True)
        except DataError:
            raise
        except UnspoolError:  # not on this machine yet
            if source in (DEFAULT_SOURCE, "default"):
                source_files(source)

    def start(self, name: str, options: Sequence[str]) -> None:
        """Start or resume the run of this name."""
        with self._starting:
            self.check_free()
            try:
                self._start(name, options)
            except OSError as error:
                raise ApiError(500, f"cannot start the training process: {error}") from None

    def _start(self, name: str, options: Sequence[str]) -> None:
        self.runs.root.mkdir(parents=True, exist_ok=True)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  read when the process has ended
        self._process = subprocess.Popen(
            [*self.command, *options],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "UNSPOOL_RUNS": str(self.runs.root)},
        )
        self.name = name
        # Reap the process when it ends; else it stays a zombie.
        Thread(target=self._process.wait, daemon=True).start()

    def fault(self, name: str) -> str | None:
        """Why the process of this run failed; None if it did not."""
        if name != self.name or self._process is None or not self._process.poll():
            return None
        lines = [line for line in self._read_output().splitlines() if line.strip()]
        last = lines[-1].strip().removeprefix("unspool: ") if lines else "no output"
        return f"the training ended with status {self._process.returncode}: {last}"

    def _read_output(self) -> str:
        assert self._output is not None
        size = self._output.seek(0, 2)
        self._output.seek(max(0, size - _OUTPUT_BYTES))
        return self._output.read().decode("utf-8", "replace")


# -- Events of a training run, from the files in its folder

_POLL_SECONDS = 0.5


@dataclass(slots=True)
class Watcher:
    """How much of a run a client has received."""

    log: int = 0  # lines
    samples: int = 0
    _run_json: dict[str, Any] | None = None
    _stamps: tuple[tuple[int, ...], ...] = ()
    _log_file: int | None = None

    def poll(self, run: Run, trainer: ServerTrainer) -> tuple[bytes, bool]:
        """New events, and whether they are the last."""
        # Read before the files: what they hold then is final.
        is_over = not trainer.trains(run.name) and run.state not in ACTIVE
        events = b""
        stamps = tuple(_stamp(run.folder / name) for name in _FILES)
        if stamps != self._stamps:
            self._stamps = stamps
            events += self._new_lines(run, stamps[0])
        current = run_json(run, trainer.fault(run.name))
        if current != self._run_json:
            self._run_json = current
            events = event(current, "run") + events
        return events, is_over

    def _new_lines(self, run: Run, stamp: tuple[int, ...]) -> bytes:
        events = b""
        inode = stamp[0] if stamp else None
        is_new = self._log_file is not None and inode != self._log_file
        self._log_file = inode
        log = run.log()
        if is_new or len(log) < self.log:  # resumed: lines were removed
            self.log = self.samples = 0
        if new := log[self.log :]:
            first, self.log = self.log, len(log)
            lines = {"from": first, "next": self.log, "lines": downsample(new)}
            events += event(lines, "log")
        if samples := run.samples(self.samples):
            first, self.samples = self.samples, self.samples + len(samples)
            events += event({"from": first, "next": self.samples, "lines": samples}, "samples")
        return events


_FILES = ("log.jsonl", "samples.jsonl")


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


async def watch(
    name: str, trainer: ServerTrainer, watcher: Watcher, is_stopping: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """Yield events until the run is over or the server stops."""
    while not is_stopping():
        run = await in_thread(find_run, name, trainer)
        if run is not None:
            events, is_over = await in_thread(watcher.poll, run, trainer)
            if events:
                yield events
            if is_over:
                yield event({"name": run.name}, "done")
                return
        await asyncio.sleep(_POLL_SECONDS)


def find_run(name: str, trainer: ServerTrainer) -> Run | None:
    """The run; None while it is starting. Raises 400 with the reason if its process failed."""
    is_starting, fault = trainer.trains(name), trainer.fault(name)
    try:
        return trainer.runs.get(name)
    except ApiError:
        if fault is not None:
            raise ApiError(400, fault, code="training_failed") from None
        if not is_starting:
            raise
    return None


# -- `/v1/runs`: the training runs of one folder, while they run and afterwards

router = new_router("Training", "/v1/runs")

Since = Annotated[int, Query(ge=0, lt=1 << 31)]
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_PATH_LIKE = re.compile(r"^[/~.]|[*?\[\\]|\.\.")


class StartRequest(Strict):
    """A small training run: everything else follows from the depth, as on the command line."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=1000)] = Field(
        "sotu", description="a data set's name, or a path on the server's machine"
    )
    depth: int = Field(4, ge=1, le=16, description="layers; width and the rest follow from it")
    minutes: float = Field(5.0, gt=0, le=24 * 60, description="how long it may take")
    seed: Seed = 0
    name: str | None = Field(None, description="of the run's folder; by default from the source")


class ControlRequest(Strict):
    """A command to a run."""

    want: Literal["pause", "go", "stop"]


@router.get("", summary="All training runs, newest first")
async def list_runs(request: Request) -> Response:
    state = state_of(request)
    trainer, refusal = server_trainer(state), _refusal(state)

    def summaries() -> list[dict[str, Any]]:
        return [summary(run, trainer.fault(run.name)) for run in trainer.runs.all()]

    return JsonReply(
        {
            "object": "list",
            "folder": str(trainer.runs.root),
            "data": await in_thread(summaries),
            "may_start": refusal is None,
            "why_not": refusal,
            "starting": trainer.name if trainer.trains(trainer.name) else None,
        }
    )


@router.post("", summary="Start a small training run")
async def start(body: StartRequest, request: Request) -> Response:
    """Responds with the name once the data is found; `events` reports progress or the failure."""
    state = state_of(request)
    trainer = server_trainer(state)
    _check_may_start(state)
    if not body.source.isprintable():
        raise bad_request("source must have printable characters only", "source")
    if not state.settings.is_local and _is_path(body.source):
        raise ApiError(403, "only clients on the server's own machine may train on a path")
    if body.name is not None and not _RUN_NAME.fullmatch(body.name):
        raise bad_request("name may have letters, digits, '.', '_' and '-'", "name")
    name = Run.free_folder(body.name or _default_name(body), trainer.runs.root).name
    options = ["new", "--depth", str(body.depth), "--minutes", f"{body.minutes:g}"]
    options += ["--seed", str(body.seed), "--name", name, "--", body.source]
    await in_thread(trainer.check_free)
    async with CancelOnDisconnect(request.receive), asyncio.timeout(state.settings.deadline):
        try:
            await in_thread(trainer.check_source, body.source)
        except UnspoolError as error:
            raise bad_request(str(error), "source", "data_not_found") from None
    await in_thread(trainer.start, name, options)
    return JsonReply(_starting_json(name))


@router.get("/{name}", summary="One run: its settings, checkpoints and log")
async def get_run(name: str, request: Request, since: Since = 0) -> Response:
    trainer = server_trainer(state_of(request))
    run = await in_thread(find_run, name, trainer)
    if run is None:
        return JsonReply(_starting_json(name))

    def reply() -> JsonReply:
        log = run.log(since)
        lines = {"log": downsample(log), "next": since + len(log), "samples": run.samples()}
        return JsonReply({**run_json(run, trainer.fault(name)), **lines})

    return await in_thread(reply)


@router.post("/{name}/control", summary="Pause, resume or stop a run")
async def control(name: str, body: ControlRequest, request: Request) -> Response:
    """A run whose process has ended is resumed from its last checkpoint, by a new process."""
    state = state_of(request)
    trainer = server_trainer(state)
    _check_may_start(state)
    run = trainer.runs.get(name)
    kind = run.facts.get("kind")
    if run.state in ACTIVE:
        run.send_command(body.want)
    elif body.want != "go":
        raise bad_request(f"{name} is already {run.state}", "want")
    elif run.state == "done" or run.resumable_checkpoint() is None or kind not in KINDS:
        raise bad_request(f"{name} is {run.state} and cannot be resumed", "want")
    else:
        await in_thread(trainer.start, name, [kind, "--resume", str(run.folder)])
    return JsonReply({"name": name, "object": "training.run", "want": body.want})


@router.get("/{name}/events", summary="Events of a run, as they happen")
async def events(name: str, request: Request, since: Since = 0, samples: Since = 0) -> Response:
    """Events `run`, `log` and `samples`, and `done` when it is over."""
    state = state_of(request)
    trainer = server_trainer(state)
    if trainer.name != name:
        trainer.runs.get(name)
    resources: AsyncExitStack = request.state.resources
    await resources.enter_async_context(CancelOnDisconnect(request.receive))
    resources.enter_context(state.watcher())

    pieces = watch(name, trainer, Watcher(since, samples), lambda: state.admission.is_stopping)
    return EventStream(writer_from(pieces), until=None, failed=error_event)


def _starting_json(name: str) -> dict[str, Any]:
    """A run whose process was started, but has written nothing yet."""
    return {"name": name, "object": "training.run", "state": "starting"}


def _refusal(state: ServerState) -> str | None:
    """Why this server starts no training, or None."""
    refusal = state.settings.refusal("trains")
    if refusal is None and find_spec("torch") is None:
        refusal = "training needs PyTorch: pip install 'unspool[train]', then restart the server"
    return refusal


def _check_may_start(state: ServerState) -> None:
    refusal = _refusal(state)
    if refusal is not None:
        raise ApiError(403, refusal, code="training_refused")


def _is_path(source: str) -> bool:
    return bool(_PATH_LIKE.search(source)) or path_exists(Path(source))


def _default_name(body: StartRequest) -> str:
    """Made of the source and the depth: speeches-d4."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(body.source).stem).strip("-") or "run"
    return f"{stem[:40]}-d{body.depth}"
