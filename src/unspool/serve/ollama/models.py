"""Ollama's `/api/tags`, `/api/ps`, `/api/show`, `/api/version`; others are rejected."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool import __version__
from unspool.model.weights import parameter_count
from unspool.serve.core.foreign import FOREVER
from unspool.serve.core.registry import ModelEntry, ServedModel
from unspool.serve.core.state import state_of
from unspool.serve.http.errors import ApiError
from unspool.serve.http.routes import JsonReply
from unspool.serve.ollama.schema import ShowRequest
from unspool.serve.ollama.writing import router

API_VERSION = "0.12.0"  # the version of Ollama whose API this is; clients check it


@router.get("/api/version", summary="The version of Ollama's API")
async def version() -> Response:
    return JsonReply({"version": API_VERSION, "unspool": __version__})


@router.get("/api/tags", summary="The models of this server")
async def tags(request: Request) -> Response:
    registry = state_of(request).registry
    created = _iso_time(registry.created)
    models = [
        {**_model_json(entry, registry.loaded.get(entry.name)), "modified_at": created}
        for entry in registry.entries.values()
    ]
    return JsonReply({"models": models})


@router.get("/api/ps", summary="The loaded models")
async def running(request: Request) -> Response:
    registry = state_of(request).registry
    entries = {**registry.ephemeral, **registry.entries}
    models = [
        {
            **_model_json(entries[name], served),
            "expires_at": _iso_time(time.time() + _seconds_left(served)),
            "size_vram": 0 if served.lm.model.device == "cpu" else entries[name].size,
            "context_length": served.lm.context,
        }
        for name, served in registry.loaded.items()
    ]
    return JsonReply({"models": models})


@router.post("/api/show", summary="Details of a model")
async def show(body: ShowRequest, request: Request) -> Response:
    registry = state_of(request).registry
    entry = registry.entry(body.model or body.name)
    served = registry.served(entry)
    reply: dict[str, Any] = {
        "modelfile": f"# served by unspool\nFROM {entry.name}\n",
        "parameters": "",
        "template": "",
        "details": _details(served),
        "model_info": {},
        "capabilities": ["completion", "embedding"],
        "modified_at": _iso_time(registry.created),
    }
    if served is not None:  # more is known of a loaded model
        tokenizer = served.lm.tokenizer
        reply["template"] = tokenizer.chat_template or ""
        reply["model_info"] = _model_info(served)
        reply["capabilities"] += ["tools"]
        if served.lm.thought_format is not None:
            reply["capabilities"] += ["thinking"]
    return JsonReply(reply)


def _model_json(entry: ModelEntry, served: ServedModel | None) -> dict[str, Any]:
    name = entry.name if ":" in entry.name else f"{entry.name}:latest"
    return {
        "name": name,
        "model": name,
        "size": entry.size,
        "digest": hashlib.sha256(f"{entry.name} {entry.size}".encode()).hexdigest(),
        "details": _details(served),
    }


def _details(served: ServedModel | None) -> dict[str, Any]:
    details = {"parent_model": "", "format": "gguf", "family": "", "families": None,
             "parameter_size": "", "quantization_level": ""}  # fmt: skip
    if served is None:
        return details
    family = served.lm.config.family
    return details | {
        "family": family,
        "families": [family],
        "parameter_size": _short_count(parameter_count(served.lm.config)),
        "quantization_level": served.lm.model.precision,
    }


def _model_info(served: ServedModel) -> dict[str, Any]:
    """Metadata by GGUF's names."""
    config, tokenizer = served.lm.config, served.lm.tokenizer
    metadata = {
        "context_length": served.lm.context,
        "block_count": config.layers,
        "embedding_length": config.width,
        "feed_forward_length": config.ff_width,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "vocab_size": config.vocab_size,
    }
    return {
        "general.architecture": config.family,
        "general.parameter_count": parameter_count(config),
        **{f"{config.family}.{name}": value for name, value in metadata.items()},
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
    }


def _short_count(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _seconds_left(served: ServedModel) -> float:
    if served.keep_alive is None:
        return FOREVER
    since = time.monotonic() if served.users else served.last_used
    return since + served.keep_alive - time.monotonic()


def _iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# -- rejected ----------------------------------------------------------------------

_ALTERNATIVES = {
    "pull": "load models with `unspool serve --model NAME`, which downloads them if needed",
    "push": "models cannot be published from here",
    "create": "start the server with another model: `unspool serve --model NAME=PATH`",
    "copy": "name a model when it is served: `unspool serve --model NAME=PATH`",
    "delete": "stop serving the model, and remove its file",
}


def _add_rejected(name: str) -> None:
    async def reject() -> Response:
        message = f"/api/{name} is not supported: the models are chosen when the server starts"
        raise ApiError(501, f"{message}; {_ALTERNATIVES[name]}", code="not_implemented")

    method = "DELETE" if name == "delete" else "POST"
    router.add_api_route(f"/api/{name}", reject, methods=[method], include_in_schema=False)


for _name in _ALTERNATIVES:
    _add_rejected(_name)
