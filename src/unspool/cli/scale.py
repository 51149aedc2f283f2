"""`unspool batch`, and `unspool serve --replicas`."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.cli.output import say, stderr_console
from unspool.errors import SettingsError, UnspoolError, count

if TYPE_CHECKING:
    from unspool.scale.batch.job import BatchProgress, WorkerPool
    from unspool.scale.batch.journal import Journal
    from unspool.server.http.settings import ServerSettings

    ShowProgress = Callable[[BatchProgress], None]

_CLUSTER = "Ray cluster"
ROWS_FAILED = 1  # exit code when the batch is finished and some rows failed
_TERMINATED = 143  # exit code that shells use for SIGTERM
_LINE_INTERVAL_S = 10.0  # between progress lines without a terminal


@o.sampling_options
@o.model_options
def batch(
    rows: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Prompts: a .jsonl or .parquet file.")
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="Answers: a .jsonl or .parquet file.")
    ],
    chat: o.Chat = None,
    system: o.System = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            help="Maximum tokens of an answer. Default: 256; in API requests, as the API.",
        ),
    ] = None,
    carry: Annotated[
        list[str] | None,
        typer.Option(help="Column of INPUT to copy to the answers. Repeatable."),
    ] = None,
    any_model: Annotated[
        bool,
        typer.Option("--any-model", help="Also answer requests that name another model."),
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start again, and overwrite existing answers.")
    ] = False,
    think: o.Think = None,
    effort: o.Effort = None,
    think_budget: o.ThinkBudget = None,
    adapter: o.Adapter = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Use a Ray cluster: RAY_ADDRESS, the one of this machine, or a new one.",
            rich_help_panel=_CLUSTER,
        ),
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the cluster; implies --ray.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of workers. Default: one per GPU, or one per machine.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    worker_cpus: Annotated[
        int | None, typer.Option(min=1, help="Cores per worker.", rich_help_panel=_CLUSTER)
    ] = None,
    quiet: o.Quiet = False,
    *,
    model_choice: o.ModelChoice,
    sampling: dict[str, Any],
) -> int:
    """Answer a file of prompts.

    A row is [b]{"prompt": "..."}[/b] or [b]{"messages": [...]}[/b], optionally with an [b]id[/b]
    and its own settings (max_tokens, temperature, seed, stop, json_schema, ...), or a request in
    OpenAI's batch format (custom_id, method, url, body).

    Rerun the same command to resume after Ctrl-C, a crash or a lost machine: no row is lost or
    answered twice. Rows that fail go with their error to OUTPUT's .errors.jsonl; the exit code is
    then 1.

    [b]Examples[/b]

      unspool batch prompts.jsonl answers.jsonl
      unspool batch prompts.parquet answers.parquet -m qwen3-0.6b -n 200 --seed 7 --carry topic
      unspool batch openai-requests.jsonl results.jsonl --any-model
      unspool batch prompts.jsonl answers.jsonl --ray --workers 8
      unspool batch prompts.jsonl answers.jsonl --address 10.0.0.1:6379
    """
    uses_cluster = ray or address is not None
    if not uses_cluster and (workers is not None or worker_cpus is not None):
        raise SettingsError("--workers and --worker-cpus are for a cluster; add --ray")
    o.check_system(system, chat)
    options = {**sampling, "max_tokens": max_tokens, "think_budget": think_budget}
    options = {name: value for name, value in options.items() if value is not None}
    o.check(options)
    model_choice.check()
    from unspool.scale import require_ray
    from unspool.scale.batch.job import LocalPool, job_identity
    from unspool.scale.batch.journal import Journal, finished_job, is_unfinished
    from unspool.scale.batch.rows import BatchSettings, check_file_type, scan_input
    from unspool.scale.batch.worker import WorkerPlan

    check_file_type(rows, "INPUT")
    check_file_type(output, "OUTPUT")
    if uses_cluster:
        require_ray("a batch on a cluster")
    facts = scan_input(rows)
    _check_output(rows, output, restart)
    with Journal(output) as journal:
        seed = options.pop("seed", None)
        record = None if restart or is_unfinished(output) else finished_job(output)
        if seed is None and not restart:
            seed = record["settings"]["seed"] if record else journal.unfinished_seed()
        settings = BatchSettings(
            seed=secrets.randbits(32) if seed is None else seed,
            options=options,
            chat=chat,
            system=system,
            think=o.thinking(think, effort),
            carry=tuple(carry or ()),
            any_model=any_model,
        )
        plan = WorkerPlan(
            _resolve_path(model_choice.model),
            model_choice.options,
            settings,
            _resolve_path(adapter),
        )
        job = job_identity(facts, plan)
        if record is not None:
            return _finished_exit_code(output, record, job)
        journal.open(job, restart=restart)

        def make_pool() -> WorkerPool:
            if not uses_cluster:
                return LocalPool(plan.worker())
            from unspool.scale.batch.job import RayPool

            return RayPool(plan, address=address, workers=workers, cpus=worker_cpus)

        return _run_batch(rows, journal, make_pool, quiet=quiet)


def _check_output(rows: Path, output: Path, restart: bool) -> None:
    from unspool.scale.batch.journal import errors_file, finished_job, is_unfinished

    o.check_output_file(output, "OUTPUT")
    if rows.resolve() in (output.resolve(), errors_file(output).resolve()):
        raise UnspoolError(f"{rows} is both INPUT and OUTPUT; give another name for OUTPUT")
    if output.exists() and not (restart or is_unfinished(output) or finished_job(output)):
        raise UnspoolError(
            f"{output} already exists; give another name, or overwrite it with --restart"
        )


def _finished_exit_code(output: Path, record: dict[str, Any], job: dict[str, Any]) -> int:
    """Exit code of a batch that is already finished; UnspoolError if its job was another one."""
    from unspool.scale.batch.journal import describe_changes, errors_file

    differences = describe_changes(record, job)
    if record["model_name"] != job["model_name"]:
        differences = f"model {record['model_name']!r} (now {job['model_name']!r})"
    if differences:
        raise UnspoolError(
            f"{output} was written with {differences}; give another name, or answer all rows "
            "again with --restart"
        )
    rows, failed = count(record["rows"], "row"), ""
    if record["failed"]:
        failed = f", {record['failed']:,} of them failed: {errors_file(output)}"
    say(f"nothing to do: {rows} in {output} already{failed}; --restart answers them again")
    return ROWS_FAILED if record["failed"] else 0


def _resolve_path(name: str | Path | None) -> str | None:
    """An absolute path, valid in every worker; other names are returned unchanged."""
    if name is None or not Path(name).expanduser().exists():
        return None if name is None else str(name)
    return str(Path(name).expanduser().resolve())


# -- progress of a batch ---------------------------------------------------------------------------


class _Terminated(KeyboardInterrupt):
    """SIGTERM; stops a batch like Ctrl-C."""


def _run_batch(
    rows: Path, journal: Journal, make_pool: Callable[[], WorkerPool], *, quiet: bool
) -> int:
    """Answer all rows, show the progress, and return the exit code."""
    from unspool.scale.batch.job import run_batch

    num_before, total = journal.num_done, journal.job["rows"]
    if num_before and not quiet:
        say(f"resuming: {num_before:,} of {count(total, 'row')} done already")
    started = time.monotonic()
    try:
        with (
            _raise_on_signals(),
            _progress_display(num_before, quiet) as show_progress,
            o.print_warnings(),
        ):
            state = run_batch(rows, journal, make_pool, show_progress)
    except KeyboardInterrupt as error:
        say(
            f"stopped: {journal.num_done:,} of {total:,} rows are done and saved in "
            f"{journal.folder}; rerun the same command to resume"
        )
        return _TERMINATED if isinstance(error, _Terminated) else interrupt.INTERRUPTED
    except OSError as error:
        raise UnspoolError(
            f"{error}: {journal.num_done:,} of {total:,} rows are done and saved in "
            f"{journal.folder}; fix the error and rerun the same command to resume"
        ) from None
    if not quiet:
        say(_summary(state, state.num_done - num_before, time.monotonic() - started, journal))
    return ROWS_FAILED if state.num_failed else 0


@contextmanager
def _raise_on_signals() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM raise exceptions, so that the journal is closed properly."""

    def on_signal(*_: object) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        with interrupt.raise_on_signal():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress_display(num_before: int, quiet: bool) -> Iterator[ShowProgress]:
    """A progress bar on a terminal, else a line every ten seconds."""
    if quiet:
        yield lambda state: None
    elif sys.stderr.isatty():
        with _progress_bar(num_before) as show_progress:
            yield show_progress
    else:
        yield _progress_lines(num_before)


@contextmanager
def _progress_bar(num_before: int) -> Iterator[ShowProgress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[speed]}"))  # fmt: skip
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task("loading the model", total=None, speed="")
        meter = _SpeedMeter(num_before)

        def show_progress(state: BatchProgress) -> None:
            label = "writing" if state.workers == 1 else f"writing with {state.workers} workers"
            bar.update(task, description=label, total=state.rows, completed=state.num_done,
                       speed=meter.describe(state))  # fmt: skip

        yield show_progress


def _progress_lines(num_before: int) -> ShowProgress:
    meter, printed_at = _SpeedMeter(num_before), time.monotonic()

    def show_progress(state: BatchProgress) -> None:
        nonlocal printed_at
        speed = meter.describe(state)
        if speed and time.monotonic() > printed_at + _LINE_INTERVAL_S:
            printed_at = time.monotonic()
            say(f"{state.num_done:,} of {state.rows:,} rows · {speed}")

    return show_progress


class _SpeedMeter:
    """Rows per second since the model was loaded."""

    def __init__(self, num_before: int) -> None:
        self.num_before, self.started = num_before, 0.0

    def describe(self, state: BatchProgress) -> str:
        now = time.monotonic()
        self.started = self.started or now
        num_rows, seconds = state.num_done - self.num_before, now - self.started
        if not num_rows or seconds <= 0:
            return ""
        remaining_s = (state.rows - state.num_done) * seconds / num_rows
        failed = f" · {state.num_failed:,} failed" if state.num_failed else ""
        return (
            f"{num_rows / seconds:,.1f} rows/s · {state.tokens / seconds:,.0f} tokens/s · "
            f"{_duration(remaining_s)} left{failed}"
        )


def _duration(seconds: float) -> str:
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole_seconds:02d} s" if minutes else f"{whole_seconds} s"


def _summary(state: BatchProgress, num_rows: int, seconds: float, journal: Journal) -> str:
    from unspool.scale.batch.journal import errors_file

    text = f"{count(num_rows, 'row')} in {_duration(seconds)}"
    if state.num_failed:
        num_answered = state.num_done - state.num_failed
        text = (
            f"{num_answered:,} of {count(state.rows, 'row')} answered, {state.num_failed:,} failed,"
            f" in {_duration(seconds)}"
        )
    if num_rows and seconds > 0:
        text += f" ({num_rows / seconds:,.1f} rows/s, {state.tokens / seconds:,.0f} tokens/s)"
    text += f": {journal.output}"
    if state.num_failed:
        first = next(row["error"] for row in journal.outcomes() if "error" in row)["error"]
        reason = first["message"] if isinstance(first, dict) else first
        text += f"; failed rows: {errors_file(journal.output)} (the first: {reason})"
    return text


# -- replicas --------------------------------------------------------------------------------------


def serve_replicas(
    model_choices: list[o.ModelChoice],
    settings: ServerSettings,
    bound: socket.socket,
    on_started: Callable[[str, list[str]], None],
    *,
    replicas: int,
    max_replicas: int | None,
    cores: int | None,
    routing: str,
    log: tuple[str, bool],
    cache_memory: int | None = None,
    model_memory: int | None = None,
    unload_after: float | None = None,
    adapters: Path | None = None,
) -> None:
    """Serve with several replicas under Ray until shutdown; they share cores, GPUs and memory."""
    from unspool.scale import require_ray

    require_ray("--replicas")
    from unspool.model.hub.locate import locate
    from unspool.scale.replicas.config import ReplicaModelConfig, ReplicasConfig
    from unspool.scale.replicas.local import serve_replicas as serve

    most = max_replicas or replicas
    uses_gpus = any(choice.device() != "cpu" for choice in model_choices)
    if not uses_gpus:
        cache_memory = cache_memory or _cache_share(most)
    models = []
    for choice in model_choices:
        choice.check()
        location = locate(choice.model, offline=bool(choice.options.get("offline")))
        model = None
        if location.path is not None:
            model = f"{location.name}={Path(location.path).resolve()}"
        models.append(
            ReplicaModelConfig(model=model, options={**choice.options, "memory": cache_memory})
        )
    config = ReplicasConfig(
        models=tuple(models),
        settings=settings,
        replicas=replicas,
        max_replicas=max_replicas,
        routing=routing,
        cores=cores or (_num_cores() // most if most <= _num_cores() else None),
        adapters=None if adapters is None else str(adapters.resolve()),
        model_memory=model_memory,
        unload_after=unload_after,
        log=log,
    )
    with interrupt.raise_on_signal():
        serve(config, bound, on_started, gpus=min(1.0, _num_gpus() / most) if uses_gpus else 0.0)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _cache_share(num_replicas: int) -> int:
    """KV cache bytes per replica: as for one server, but at most half of free memory in all."""
    from unspool.backends.step import free_memory

    return min(2 << 30, free_memory() // 2 // num_replicas)
