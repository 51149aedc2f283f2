"""`/v1/runs`: the trainings below one folder, as they go and afterwards.

Reading is open to whoever may ask this server. Starting, pausing and stopping use up the machine,
and so need one of two things: that only programs on this machine reach the server, or a key.
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
from unspool.serve.http.events import EventStream, pouring
from unspool.serve.http.routes import JsonReply, new_router
from unspool.serve.http.threads import in_thread
from unspool.serve.runs.library import is_there
from unspool.serve.runs.run_json import drawable, run_json, summary
from unspool.serve.runs.trainer import GOING
from unspool.serve.runs.watching import Watcher, find_run, run_error, watch
from unspool.train.running.runs import KINDS, Run

router = new_router("Training", "/v1/runs")

Since = Annotated[int, Query(ge=0, lt=1 << 31)]
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_PATH_LIKE = re.compile(r"^[/~.]|[*?\[\\]|\.\.")


class StartRequest(Strict):
    """A small training: all else follows from the depth, as on the command line."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=1000)] = Field(
        "sotu", description="a data set's name, or a path on the server's machine"
    )
    depth: int = Field(4, ge=1, le=16, description="layers; width and the rest follow from it")
    minutes: float = Field(5.0, gt=0, le=24 * 60, description="how long it may take")
    seed: Seed = 0
    name: str | None = Field(None, description="of the run's folder; by default from the source")


class ControlRequest(Strict):
    """What is wanted of a run."""

    want: Literal["pause", "go", "stop"]


@router.get("", summary="All training runs, the newest first")
async def list_runs(request: Request) -> Response:
    state = state_of(request)

    def found() -> list[dict[str, Any]]:
        return [summary(run, state.trainer.fault(run.name)) for run in state.runs.all()]

    refusal = state.settings.refusal("trains")
    return JsonReply(
        {
            "object": "list",
            "folder": str(state.runs.root),
            "data": await in_thread(found),
            "may_start": refusal is None,
            "why_not": refusal,
            "starting": state.trainer.name if state.trainer.trains(state.trainer.name) else None,
        }
    )


@router.post("", summary="Start a small training")
async def start(body: StartRequest, request: Request) -> Response:
    """Answers with its name once the data is there; `events` then tells how it goes, or why it
    could not begin."""
    state = state_of(request)
    _check_may_start(state)
    if not body.source.isprintable():
        raise bad_request("source has characters that no name has", "source")
    if not state.settings.is_local and _is_path(body.source):
        raise ApiError(403, "a path can be trained on only from the server's own machine")
    if body.name is not None and not _PLAIN.fullmatch(body.name):
        raise bad_request("name may have letters, digits, '.', '_' and '-'", "name")
    name = Run.free_folder(body.name or _name_of(body), state.runs.root).name
    options = ["new", "--depth", str(body.depth), "--minutes", f"{body.minutes:g}"]
    options += ["--seed", str(body.seed), "--name", name, "--", body.source]
    await in_thread(state.trainer.check_free)
    async with CancelOnDisconnect(request.receive), asyncio.timeout(state.settings.deadline):
        try:
            await in_thread(state.trainer.check_source, body.source)
        except UnspoolError as error:
            raise bad_request(str(error), "source", "data_not_found") from None
    await in_thread(state.trainer.start, name, options)
    return JsonReply(_starting_json(name))


@router.get("/{name}", summary="One run: its settings, its checkpoints, its log")
async def get_run(name: str, request: Request, since: Since = 0) -> Response:
    state = state_of(request)
    run = await in_thread(find_run, name, state.trainer)
    if run is None:
        return JsonReply(_starting_json(name))

    def found() -> JsonReply:
        log = run.log(since)
        lines = {"log": drawable(log), "next": since + len(log), "samples": run.samples()}
        return JsonReply({**run_json(run, state.trainer.fault(name)), **lines})

    return await in_thread(found)


@router.post("/{name}/control", summary="Have a run paused, gone on with, or stopped")
async def control(name: str, body: ControlRequest, request: Request) -> Response:
    """A run whose process has ended is gone on with from its last checkpoint by a new one."""
    state = state_of(request)
    _check_may_start(state)
    run = state.runs.get(name)
    kind = run.facts.get("kind")
    if run.state in GOING:
        run.ask(body.want)
    elif body.want != "go":
        raise bad_request(f"{name} is {run.state} already", "want")
    elif run.state == "done" or run.resumable() is None or kind not in KINDS:
        raise bad_request(f"{name} is {run.state}: there is nothing to go on with", "want")
    else:
        await in_thread(state.trainer.start, name, [kind, "--resume", str(run.folder)])
    return JsonReply({"name": name, "object": "training.run", "want": body.want})


@router.get("/{name}/events", summary="What happens to a run, as it happens")
async def events(name: str, request: Request, since: Since = 0, samples: Since = 0) -> Response:
    """Events `run`, `log` and `samples`, and `done` when it is over."""
    state = state_of(request)
    if state.trainer.name != name:
        state.runs.get(name)
    resources: AsyncExitStack = request.state.resources
    await resources.enter_async_context(CancelOnDisconnect(request.receive))
    resources.enter_context(state.branches.watcher())

    pieces = watch(name, state.trainer, Watcher(since, samples), lambda: state.admission.refusing)
    return EventStream(pouring(pieces), until=None, failed=run_error)


def _starting_json(name: str) -> dict[str, Any]:
    """A run whose process has begun, and has written nothing yet."""
    return {"name": name, "object": "training.run", "state": "starting"}


def _check_may_start(state: ServerState) -> None:
    refusal = state.settings.refusal("trains")
    if refusal is not None:
        raise ApiError(403, refusal, code="training_refused")


def _is_path(source: str) -> bool:
    return bool(_PATH_LIKE.search(source)) or is_there(Path(source))


def _name_of(body: StartRequest) -> str:
    """From the source and the depth: speeches-d4."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(body.source).stem).strip("-") or "run"
    return f"{stem[:40]}-d{body.depth}"
