"""Ollama's `/api/tags`, `/api/ps`, `/api/show`, `/api/version`; and what is refused of it."""

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
from unspool.serve.http.routes import JsonReply, new_router
from unspool.serve.ollama.schema import ShowRequest

router = new_router("Ollama")
API_VERSION = "0.12.0"  # of Ollama, whose API this follows: clients ask whether it is new enough


@router.get("/api/version", summary="Which Ollama's API this is")
async def version() -> Response:
    return JsonReply({"version": API_VERSION, "unspool": __version__})


@router.get("/api/tags", summary="The models this server has")
async def tags(request: Request) -> Response:
    registry = state_of(request).registry
    since = _time(registry.created)
    found = [
        {**_model(entry, registry.loaded.get(entry.name)), "modified_at": since}
        for entry in registry.entries.values()
    ]
    return JsonReply({"models": found})


@router.get("/api/ps", summary="The models that are loaded")
async def running(request: Request) -> Response:
    registry = state_of(request).registry
    known = {**registry.ephemeral, **registry.entries}
    found = [
        {
            **_model(known[name], served),
            "expires_at": _time(time.time() + _seconds_left(served)),
            "size_vram": 0 if served.lm.model.device == "cpu" else known[name].size,
            "context_length": served.lm.context,
        }
        for name, served in registry.loaded.items()
    ]
    return JsonReply({"models": found})


@router.post("/api/show", summary="What is known of a model")
async def show(body: ShowRequest, request: Request) -> Response:
    registry = state_of(request).registry
    entry = registry.entry(body.model or body.name)
    served = registry.served(entry)
    found: dict[str, Any] = {
        "modelfile": f"# served by unspool\nFROM {entry.name}\n",
        "parameters": "",
        "template": "",
        "details": _details(served),
        "model_info": {},
        "capabilities": ["completion", "embedding"],
        "modified_at": _time(registry.created),
    }
    if served is not None:  # the rest is not known before a model is loaded
        tokenizer = served.lm.tokenizer
        found["template"] = tokenizer.chat_template or ""
        found["model_info"] = _model_info(served)
        found["capabilities"] += ["tools"]
        if served.lm.thought_format is not None:
            found["capabilities"] += ["thinking"]
    return JsonReply(found)


def _model(entry: ModelEntry, served: ServedModel | None) -> dict[str, Any]:
    name = entry.name if ":" in entry.name else f"{entry.name}:latest"
    return {
        "name": name,
        "model": name,
        "size": entry.size,
        "digest": hashlib.sha256(f"{entry.name} {entry.size}".encode()).hexdigest(),
        "details": _details(served),
    }


def _details(served: ServedModel | None) -> dict[str, Any]:
    found = {"parent_model": "", "format": "gguf", "family": "", "families": None,
             "parameter_size": "", "quantization_level": ""}  # fmt: skip
    if served is None:
        return found
    family = served.lm.config.family
    return found | {
        "family": family,
        "families": [family],
        "parameter_size": _short(parameter_count(served.lm.config)),
        "quantization_level": served.lm.model.precision,
    }


def _model_info(served: ServedModel) -> dict[str, Any]:
    """As GGUF files name it."""
    config, tokenizer = served.lm.config, served.lm.tokenizer
    found = {
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
        **{f"{config.family}.{name}": value for name, value in found.items()},
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
    }


def _short(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _seconds_left(served: ServedModel) -> float:
    if served.keep_alive is None:
        return FOREVER
    since = time.monotonic() if served.users else served.used
    return since + served.keep_alive - time.monotonic()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# -- what is refused -------------------------------------------------------------------------

_HOW = {
    "pull": "load models with `unspool serve --model NAME`; it downloads what is not there",
    "push": "models are not published from here",
    "create": "start the server with another model: `unspool serve --model NAME=PATH`",
    "copy": "a model gets another name when it is served: `unspool serve --model NAME=PATH`",
    "delete": "stop serving it, and remove its file",
}


def _refuse(name: str) -> None:
    async def refused() -> Response:
        message = f"/api/{name} is not there: this server's models are chosen when it starts"
        raise ApiError(501, f"{message}; {_HOW[name]}", code="not_implemented")

    method = "DELETE" if name == "delete" else "POST"
    router.add_api_route(f"/api/{name}", refused, methods=[method], include_in_schema=False)


for _name in _HOW:
    _refuse(_name)
