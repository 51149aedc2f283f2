"""For those who run the server: `/health`, `/ready`, `/metrics`."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from unspool.serve.faults import ApiError
from unspool.serve.house import house_of
from unspool.serve.json_reply import JsonReply
from unspool.serve.routes import new_router

router = new_router("Operation")


@router.get("/health", summary="The process lives")
async def health() -> Response:
    return JsonReply({"status": "ok"})


@router.get("/ready", summary="The server takes requests")
async def ready(request: Request) -> Response:
    house = house_of(request)
    if house.admission.refusing or not house.ready:
        raise ApiError(503, "the server is not ready", code="not_ready", retry_after=1)
    for served in house.shelf.loaded.values():
        if not served.is_alive:  # so its places would never come free
            message = f"the engine of {served.name} has stopped; restart the server"
            raise ApiError(503, message, code="engine_stopped")
    return JsonReply({"status": "ready", "models": list(house.shelf.loaded)})


@router.get("/metrics", summary="Counters for Prometheus")
async def metrics(request: Request) -> Response:
    house = house_of(request)
    return Response(house.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
