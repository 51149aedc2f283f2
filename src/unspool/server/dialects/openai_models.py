"""`GET /v1/models`: the models of the server."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool.errors import UnspoolError
from unspool.server.http.errors import ApiError
from unspool.server.http.middleware import CancelOnDisconnect
from unspool.server.http.replies import JsonReply, new_router
from unspool.server.runtime.registry import AdapterEntry, ModelEntry
from unspool.server.runtime.state import ServerState, state_of

router = new_router("OpenAI")


@router.get("/models", include_in_schema=False)
@router.get("/v1/models", summary="The models of this server")
async def list_models(request: Request) -> Response:
    state = state_of(request)
    registry = state.registry
    entries: list[ModelEntry | AdapterEntry] = [*registry.entries.values()]
    entries += registry.adapters().values()
    return JsonReply({"object": "list", "data": [_model_json(state, entry) for entry in entries]})


@router.get("/v1/models/{model:path}", summary="One model")
async def get_model(model: str, request: Request) -> Response:
    state = state_of(request)
    return JsonReply(_model_json(state, state.registry.entry(model)))


@router.post("/v1/models/{model:path}/load", summary="Load a model into memory")
async def load_model(model: str, request: Request) -> Response:
    """Responds as `GET` does, once it is loaded; else with the reason."""
    state = state_of(request)
    entry = state.registry.entry(model)
    try:
        async with (
            CancelOnDisconnect(request.receive),
            asyncio.timeout(state.settings.deadline),
            state.registry.use(model),
        ):
            return JsonReply(_model_json(state, entry))
    except (ApiError, UnspoolError, TimeoutError, ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception as error:  # a damaged file can break anything
        raise ApiError(500, f"{model} cannot be loaded: {error}") from error


def _model_json(state: ServerState, entry: ModelEntry | AdapterEntry) -> dict[str, Any]:
    """OpenAI's fields, and under `unspool` what is known; more for a loaded model."""
    served = state.registry.served(entry)
    base = entry.base if isinstance(entry, AdapterEntry) else None
    details: dict[str, Any] = {
        "loaded": served is not None,
        "loading": state.registry.is_loading(entry.name),
        "bytes": entry.size,
        "fits": entry.size <= state.registry.model_memory,
        "source": entry.source if isinstance(entry, ModelEntry) else "adapters",
    }
    if served is not None:
        lm = served.lm
        details.update(
            default=lm.is_default,
            system_fingerprint=served.fingerprint,
            context=lm.context,
            vocabulary=lm.vocab_size,
            precision=lm.model.precision,
            device=lm.model.device,
            chat=lm.is_instruct,
            tools=served.tools.name,
            layers=lm.config.layers,
            heads=lm.config.heads,
            width=lm.config.width,
            sight=lm.config.sight,
            mask_id=lm.config.mask_id,
        )
    return {
        "id": entry.name,
        "object": "model",
        "created": state.registry.created,
        "owned_by": "unspool",
        **({"parent": base} if base is not None else {}),  # the model that an adapter belongs to
        "unspool": details,
    }
