"""`/v1/costs`: what writing one token at a time costs, measured with a model of this server.

Measuring takes minutes and all of the machine, so it needs what training needs (only programs on
this machine reach the server, or a key), and there is one at a time. Reports are kept.
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

from unspool.costing import stored
from unspool.costing.measuring import PARTS, chosen_parts, costs
from unspool.costing.part import Part
from unspool.costing.report import Report
from unspool.errors import UnspoolError
from unspool.serve.core.schema import Seed, Strict
from unspool.serve.core.state import Call, state_of
from unspool.serve.http.errors import ApiError
from unspool.serve.http.events import EventStream, event, pouring
from unspool.serve.http.routes import JsonReply, new_router
from unspool.serve.http.threads import in_thread
from unspool.serve.tree.writing import error_event

router = new_router("Costs", "/v1/costs")
_one_at_a_time = Lock()


class CostsRequest(Strict):
    """Which model is measured, and how much of it."""

    model: str | None = None
    quick: bool = Field(True, description="a look in under a minute, with wide intervals")
    parts: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description=f"only these of {', '.join(PARTS)}"
    )
    seed: Seed = 0


@router.get("", summary="Reports that were kept, the newest first")
async def list_reports(request: Request) -> Response:
    refusal = state_of(request).settings.refusal("measures")
    return JsonReply(
        {
            "object": "list",
            "data": await in_thread(stored.known),
            "parts": list(PARTS),
            "may_measure": refusal is None,
            "why_not": refusal,
        }
    )


@router.get("/{name}", summary="One of them, whole")
async def get_report(name: str) -> Response:
    return JsonReply(await in_thread(_known, stored.read, name))


@router.delete("/{name}", summary="Forget one of them")
async def forget_report(name: str, request: Request) -> Response:
    _check_may_measure(request)
    await in_thread(_known, stored.forget, name)
    return JsonReply({"name": name, "object": "costs.report", "deleted": True})


@router.post("", summary="Measure a model, part by part")
async def measure(body: CostsRequest, request: Request) -> Response:
    """Events: `start` with the parts to come; `progress` with a part's name and how much of it is
    done (0 to 1); `part` with each that was measured; and `done` with the name under which the
    report is kept, and the report. Whoever hangs up ends the measuring, and nothing is kept."""
    _check_may_measure(request)
    names = chosen_parts(body.parts)
    call = await state_of(request).enter(request, body.model)
    work = await call.hold(_Measuring(call, body, names))
    return EventStream(pouring(work.events()), until=None, failed=error_event)


def _check_may_measure(request: Request) -> None:
    refusal = state_of(request).settings.refusal("measures")
    if refusal is not None:
        raise ApiError(403, refusal, code="measuring_refused")


def _known(work: Any, name: str) -> Any:
    try:
        return work(name)
    except UnspoolError as error:
        raise ApiError(404, str(error), param="name", code="report_not_found") from error


class _StoppedError(Exception):
    """Nobody waits for the report any more."""


class _Measuring:
    """A report that is being measured on a thread, and what it tells meanwhile. A context: who
    leaves it ends the work at the next thing that it tells, and waits for that."""

    def __init__(self, call: Call, body: CostsRequest, names: list[str]) -> None:
        self._lm: Any = call.served.lm
        self._body, self._names, self._run = body, names, call.run
        self._model = call.served.name
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._stops = Event()
        self._work: asyncio.Future[Report] | None = None

    async def __aenter__(self) -> Self:
        if not _one_at_a_time.acquire(blocking=False):
            message = "another report is being measured; wait for it, or stop it"
            raise ApiError(409, message, code="measuring_already")
        self._work = asyncio.ensure_future(self._run(self._measure))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stops.set()
        assert self._work is not None
        with suppress(Exception):  # told to the client already, or nobody waits for it
            await asyncio.shield(self._work)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """What is told, until the report is there."""
        assert self._work is not None
        asked = {"quick": self._body.quick, "seed": self._body.seed}
        yield event({"model": self._model, "parts": self._names, **asked}, "start")
        while (told := await self._told.get()) is not None:
            yield told
        report = (await self._work).to_dict()
        name = await in_thread(stored.keep, report)
        yield event({"name": name, "report": report}, "done")

    def _measure(self) -> Report:
        try:
            return costs(
                self._lm,
                quick=self._body.quick,
                parts=self._names,
                seed=self._body.seed,
                progress=False,
                watch=self._watch,
            )
        finally:
            _one_at_a_time.release()
            self._tell(None)

    def _watch(self, name: str, share: float, part: Part | None) -> None:
        if self._stops.is_set():
            raise _StoppedError
        if part is None:
            self._tell(event({"part": name, "share": share}, "progress"))
        else:
            self._tell(event(part.to_dict(), "part"))

    def _tell(self, what: bytes | None) -> None:
        with suppress(RuntimeError):  # the server has stopped
            self._loop.call_soon_threadsafe(self._told.put_nowait, what)
