"""`/v1/catalogue`: recommended models, and downloading one.

A download is `unspool models pull` in a separate process, which ends when the client disconnects;
the next download resumes it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool.model.hub.catalogue import CatalogueEntry, catalogue
from unspool.model.hub.download import cache_folder
from unspool.model.hub.memory import free_memory
from unspool.model.hub.stores import hub_cache_folder
from unspool.server.http.errors import ApiError
from unspool.server.http.events import EventStream, error_event, event, writer_from
from unspool.server.http.middleware import CancelOnDisconnect
from unspool.server.http.replies import JsonReply, new_router
from unspool.server.runtime.state import ServerState, state_of
from unspool.server.runtime.threads import in_thread

router = new_router("Models to download", "/v1/catalogue")
_POLL_SECONDS = 0.5  # between two reports of progress
_STOP_SECONDS = 5.0  # a process that does not end by then is killed
_MAX_REASON = 500  # characters of an error message


@router.get("", summary="Recommended models, with their size and what fits in memory")
async def list_catalogue(request: Request) -> Response:
    refusal = _refusal(state_of(request))
    data = await in_thread(lambda: [_entry_json(entry) for entry in catalogue().values()])
    may = {"may_download": refusal is None, "why_not": refusal}
    return JsonReply({"object": "list", "data": data, **may})


@router.post("/{name}/pull", summary="Download a model, with events for its progress")
async def pull(name: str, request: Request) -> Response:
    """Sends `progress` events with the bytes done and their total, then `done` with the ids of
    the models that were added, or `error`."""
    state = state_of(request)
    if (refusal := _refusal(state)) is not None:
        raise ApiError(403, refusal, code="download_refused")
    entry = catalogue().get(name)
    if entry is None:
        message = f"no such model in the catalogue: {name[:60]!r}; GET /v1/catalogue lists them"
        raise ApiError(404, message, param="model", code="model_not_found")
    resources: AsyncExitStack = request.state.resources
    await resources.enter_async_context(CancelOnDisconnect(request.receive))
    return EventStream(writer_from(_download(state, entry)), until=None, failed=error_event)


def _refusal(state: ServerState) -> str | None:
    return state.settings.refusal("downloads")


def _entry_json(entry: CatalogueEntry) -> dict[str, Any]:
    kind, fits = entry.best(free_memory())
    return {
        "id": entry.name,
        "object": "catalogue.model",
        "repository": entry.repository,
        "parameters": entry.parameters,
        "context": entry.context,
        "kind": kind,
        "bytes": entry.bytes(kind),
        "fits": fits,
        "licence": entry.licence,
        "use": entry.use,
    }


def _command(entry: CatalogueEntry) -> list[str]:
    return [sys.executable, "-m", "unspool", "models", "pull", entry.name]


async def _download(state: ServerState, entry: CatalogueEntry) -> AsyncGenerator[bytes, None]:
    folder, total = _folder(entry), entry.bytes(entry.best()[0])
    before = 0 if not entry.is_default else await in_thread(_bytes_in, folder)
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*_command(entry), stdout=null, stderr=pipe)
    ending = asyncio.ensure_future(process.communicate())
    try:
        while not ending.done():
            done = max(0, await in_thread(_bytes_in, folder) - before)
            yield event({"done": min(done, total), "total": total}, "progress")
            await asyncio.wait([ending], timeout=_POLL_SECONDS)
        if process.returncode:
            raise ApiError(502, _reason(ending.result()[1], entry.name), code="download_failed")
        names_before = set(state.registry.entries)
        state.registry.add(await in_thread(state.registry.find_local))
        added = [name for name in state.registry.entries if name not in names_before]
        yield event({"models": added}, "done")
    finally:
        if process.returncode is None:
            process.terminate()
            done_tasks, _ = await asyncio.wait([ending], timeout=_STOP_SECONDS)
            if not done_tasks:
                process.kill()
                await asyncio.wait([ending])


def _reason(stderr: bytes, name: str) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{name} could not be downloaded: {lines[-1] if lines else 'no reason given'}"[
        :_MAX_REASON
    ]


def _folder(entry: CatalogueEntry) -> Path:
    """Where the files of a model grow while it is downloaded."""
    if entry.is_default:
        return cache_folder() / "models"
    return hub_cache_folder() / f"models--{entry.repository.replace('/', '--')}" / "blobs"


def _bytes_in(folder: Path) -> int:
    total = 0
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):  # it was renamed meanwhile
                total += file.stat().st_size
    return total
