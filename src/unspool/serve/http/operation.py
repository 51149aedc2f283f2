"""For operators: `/health`, `/ready`, `/metrics`."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from unspool.serve.core.state import state_of
from unspool.serve.http.errors import ApiError
from unspool.serve.http.routes import JsonReply, new_router

operation_router = new_router("Operation")


@operation_router.get("/health", summary="Whether the process is alive")
@operation_router.get("/v1/health", include_in_schema=False)
async def health() -> Response:
    return JsonReply({"status": "ok"})


@operation_router.get("/ready", summary="Whether the server accepts requests")
async def ready(request: Request) -> Response:
    state = state_of(request)
    if state.admission.is_stopping or not state.ready:
        raise ApiError(503, "the server is not ready", code="not_ready", retry_after=1)
    for served in state.registry.loaded.values():
        if not served.is_alive:  # its places would never be released
            message = f"the engine of {served.name} has stopped; restart the server"
            raise ApiError(503, message, code="engine_stopped")
    return JsonReply({"status": "ready", "models": list(state.registry.loaded)})


@operation_router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    state = state_of(request)
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
