"""`/v1/runs`: the training runs of one folder, while they run and afterwards.

Any client of the server may read them. Starting, pausing and stopping a run requires an API key,
or a server that only programs on this machine can reach.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from unspool.errors import UnspoolError
from unspool.serve.core.schema import Seed, Strict
from unspool.serve.core.state import ServerState, state_of
from unspool.serve.http.disconnect import CancelOnDisconnect
from unspool.serve.http.errors import ApiError, bad_request
from unspool.serve.http.events import EventStream, error_event, writer_from
from unspool.serve.http.routes import JsonReply, new_router
from unspool.serve.http.threads import in_thread
from unspool.serve.runs.library import path_exists
from unspool.serve.runs.run_json import downsample, run_json, summary
from unspool.serve.runs.trainer import ACTIVE, server_trainer
from unspool.serve.runs.watching import Watcher, find_run, watch
from unspool.train.running.runs import KINDS, Run

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
    trainer, refusal = server_trainer(state), state.settings.refusal("trains")

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


def _check_may_start(state: ServerState) -> None:
    refusal = state.settings.refusal("trains")
    if refusal is not None:
        raise ApiError(403, refusal, code="training_refused")


def _is_path(source: str) -> bool:
    return bool(_PATH_LIKE.search(source)) or path_exists(Path(source))


def _default_name(body: StartRequest) -> str:
    """Made of the source and the depth: speeches-d4."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(body.source).stem).strip("-") or "run"
    return f"{stem[:40]}-d{body.depth}"
