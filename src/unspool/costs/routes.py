"""`/v1/costs`: measure what writing one token at a time costs, with a model of this server.

A measurement takes minutes and the whole machine. It requires an API key, or a server that only
programs on this machine can reach, and one runs at a time. Reports are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from threading import Event, Lock
from typing import Annotated, Any, Self

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.costs import stored
from unspool.costs.measuring import PARTS, measure_costs, select_parts
from unspool.costs.part import CostPart
from unspool.costs.report import Report
from unspool.errors import UnspoolError
from unspool.server.http.errors import ApiError
from unspool.server.http.events import EventStream, error_event, event, writer_from
from unspool.server.http.replies import JsonReply, new_router
from unspool.server.runtime.schema import Seed, Strict
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.threads import in_thread

router = new_router("Costs", "/v1/costs")
_measuring = Lock()  # one measurement at a time


class CostsRequest(Strict):
    """Which model to measure, and which parts of the report."""

    model: str | None = None
    quick: bool = Field(True, description="under a minute, with wide intervals")
    parts: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description=f"only these of {', '.join(PARTS)}"
    )
    seed: Seed = 0


@router.get("", summary="Stored reports, newest first")
async def list_reports(request: Request) -> Response:
    refusal = state_of(request).settings.refusal("measures")
    return JsonReply(
        {
            "object": "list",
            "data": await in_thread(stored.list_reports),
            "parts": list(PARTS),
            "may_measure": refusal is None,
            "why_not": refusal,
        }
    )


@router.get("/{name}", summary="One report")
async def get_report(name: str) -> Response:
    return JsonReply(await in_thread(_find_report, stored.read_report, name))


@router.delete("/{name}", summary="Delete a report")
async def delete_report(name: str, request: Request) -> Response:
    _check_may_measure(request)
    await in_thread(_find_report, stored.delete_report, name)
    return JsonReply({"name": name, "object": "costs.report", "deleted": True})


@router.post("", summary="Measure a model, part by part")
async def measure(body: CostsRequest, request: Request) -> Response:
    """Events: `start` lists the parts; `progress` has a part's name and the fraction done (0 to 1);
    `part` has the result of one; `done` has the report and the name it is stored under.
    Disconnecting stops the measurement, and nothing is stored."""
    _check_may_measure(request)
    names = select_parts(body.parts)
    call = await state_of(request).enter(request, body.model)
    measurement = await call.hold(_Measurement(call, body, names))
    return EventStream(writer_from(measurement.events()), until=None, failed=error_event)


def _check_may_measure(request: Request) -> None:
    refusal = state_of(request).settings.refusal("measures")
    if refusal is not None:
        raise ApiError(403, refusal, code="measuring_refused")


def _find_report(work: Any, name: str) -> Any:
    """Call `work(name)`; an unknown name is a 404."""
    try:
        return work(name)
    except UnspoolError as error:
        raise ApiError(404, str(error), param="name", code="report_not_found") from error


class _StoppedError(Exception):
    """The client has disconnected."""


class _Measurement:
    """A measurement on a thread, and its events. A context manager: exiting it stops the work at
    its next progress report, and waits for that."""

    def __init__(self, call: Call, body: CostsRequest, names: list[str]) -> None:
        self._lm: Any = call.served.lm
        self._body, self._names, self._run = body, names, call.run
        self._model = call.served.name
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._stops = Event()
        self._work: asyncio.Future[Report] | None = None

    async def __aenter__(self) -> Self:
        if not _measuring.acquire(blocking=False):
            message = "another report is being measured; wait until it is done, or stop it"
            raise ApiError(409, message, code="measuring_already")
        self._work = asyncio.ensure_future(self._run(self._measure))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stops.set()
        assert self._work is not None
        with suppress(Exception):  # the client has received it, or has disconnected
            await asyncio.shield(self._work)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events until the report is complete."""
        assert self._work is not None
        options = {"quick": self._body.quick, "seed": self._body.seed}
        yield event({"model": self._model, "parts": self._names, **options}, "start")
        while (data := await self._events.get()) is not None:
            yield data
        report = (await self._work).to_dict()
        name = await in_thread(stored.save_report, report)
        yield event({"name": name, "report": report}, "done")

    def _measure(self) -> Report:
        try:
            return measure_costs(
                self._lm,
                quick=self._body.quick,
                parts=self._names,
                seed=self._body.seed,
                progress=False,
                watch=self._on_progress,
            )
        finally:
            _measuring.release()
            self._send(None)

    def _on_progress(self, name: str, share: float, part: CostPart | None) -> None:
        if self._stops.is_set():
            raise _StoppedError
        if part is None:
            self._send(event({"part": name, "share": share}, "progress"))
        else:
            self._send(event(part.to_dict(), "part"))

    def _send(self, data: bytes | None) -> None:
        with suppress(RuntimeError):  # the server has stopped
            self._loop.call_soon_threadsafe(self._events.put_nowait, data)
