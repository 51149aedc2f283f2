"""`POST /v1/embeddings`: mean-pooled hidden states of a language model.

The models are trained to generate, not to embed. An embedding is the mean over all tokens of the
hidden states after the final norm, scaled to length one; the response says so.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.lens.embeddings import embedding
from unspool.server.http.errors import unsupported
from unspool.server.http.replies import new_router
from unspool.server.runtime.hidden_states import read_hidden_states
from unspool.server.runtime.schema import ForeignRequest, Prompts, Returned, Strict, as_list
from unspool.server.runtime.state import Call, state_of

router = new_router("OpenAI")


class EmbeddingExtension(Strict):
    """Unspool-specific fields of an embedding."""

    return_: Returned | None = Field(
        None, alias="return", description="hidden states of the texts, under `unspool`"
    )


class EmbeddingRequest(ForeignRequest):
    """Texts, or token ids."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    unspool: EmbeddingExtension | None = None


@router.post("/v1/embeddings", summary="Embed texts (mean-pooled hidden states)")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    state = state_of(request)
    call = await state.enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_answer(call, body))


async def _answer(call: Call, body: EmbeddingRequest) -> dict[str, Any]:
    lm = call.served.lm
    check_dimensions(call, body.dimensions)
    prompts = await call.compute(_ids, call, as_list(body.input))
    extension: dict[str, Any] = {
        "pooling": "mean of the final hidden states",
        "normalized": True,
    }
    if body.unspool is not None and body.unspool.return_ is not None:
        extension["hidden_states"] = await call.compute(
            read_hidden_states, lm, body.unspool.return_.hidden_states, prompts
        )
    vectors = await call.compute_all(partial(embedding, lm), prompts)
    count = sum(map(len, prompts))
    packed = body.encoding_format == "base64"
    return {
        "object": "list",
        "model": call.served.name,
        "data": [
            {"object": "embedding", "index": i, "embedding": _packed(v) if packed else v.tolist()}
            for i, v in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count},
        "unspool": extension,
    }


def check_dimensions(call: Call, dimensions: int | None) -> None:
    width = call.served.lm.config.width
    if dimensions not in (None, width):
        raise unsupported("dimensions", f"the vectors of this model have {width} dimensions")


def _ids(call: Call, many: list[Any]) -> list[list[int]]:
    for text in many:
        if isinstance(text, str):
            call.check_text(text)
    prompts = [call.served.lm.prompt_ids(text) for text in many]
    for ids in prompts:
        call.check_prompt(len(ids))
    return prompts


def _packed(vector: Any) -> str:
    """Little-endian 32-bit floats in base64, as in OpenAI's API."""
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")
