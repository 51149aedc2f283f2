"""llama.cpp's `/embedding`, `/embeddings` and `/rerank`, which differ from OpenAI's."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.lens.embedding import embedding
from unspool.serve.core.schema import ForeignRequest, Strict
from unspool.serve.core.state import Call, state_of
from unspool.serve.http.errors import ApiError, bad_request
from unspool.serve.llamacpp.completion import encode_mixed, router
from unspool.serve.llamacpp.schema import MixedPrompts, split_prompts

_INT16_SCALE = 32760.0  # largest number of vectors that are scaled for 16-bit integers


class LlamaEmbeddingRequest(ForeignRequest):
    """Texts, token ids, or a mix; `content` is an older name for `input`."""

    model: str | None = None
    input: MixedPrompts | None = None
    content: MixedPrompts | None = None
    encoding_format: Literal["float"] | None = None
    embd_normalize: int = Field(
        2, ge=0, le=64, description="0: largest number is 32760; 1, 2, ...: length by this norm"
    )


class RerankRequest(Strict):
    """Documents to rank for a query, with the parameters of Jina's and TEI's APIs."""

    model: str | None = None
    query: str
    documents: list[str] | None = Field(None, min_length=1)
    texts: list[str] | None = Field(None, min_length=1)
    top_n: int | None = Field(None, ge=1)
    return_text: bool | None = None


@router.post("/embedding", include_in_schema=False)
@router.post("/embeddings", summary="Embed texts (mean-pooled hidden states)")
async def llama_embeddings(body: LlamaEmbeddingRequest, request: Request) -> Response:
    if (body.input is None) == (body.content is None):
        raise bad_request("give either input or content", "input")
    content = body.input if body.input is not None else body.content
    assert content is not None
    prompts = split_prompts(content, "input")
    call = await state_of(request).enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_embed_prompts(call, prompts, body.embd_normalize))


async def _embed_prompts(
    call: Call, prompts: list[list[int | str]], norm: int
) -> list[dict[str, Any]]:
    ids = await call.compute(_encode, call, prompts)
    vectors = await call.compute_all(partial(embedding, call.served.lm), ids)
    return [
        {"index": i, "embedding": [_scaled(vector, norm).tolist()]}
        for i, vector in enumerate(vectors)
    ]


def _encode(call: Call, prompts: list[list[int | str]]) -> list[list[int]]:
    # Texts to embed are content, not prompts: control tokens in them are text.
    ids = [encode_mixed(call, prompt, parse_special=False) for prompt in prompts]
    for row in ids:
        call.check_prompt(len(row))
    return ids


def _scaled(vector: Any, norm: int) -> Any:
    """Scale a unit vector by another norm."""
    if norm == 2:
        return vector
    if norm == 0:
        return vector * (_INT16_SCALE / max(float(np.abs(vector).max()), 1e-12))
    return vector / max(float(np.linalg.norm(vector, norm)), 1e-12)


@router.post("/rerank", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)
@router.post("/v1/rerank", include_in_schema=False)
@router.post("/v1/reranking", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request) -> Response:
    if body.documents is None and body.texts is None:
        raise bad_request("documents is missing; it must be a non-empty list of texts", "documents")
    state_of(request).registry.entry(body.model)
    message = "this server does not support reranking: it serves language models, not rerankers"
    raise ApiError(501, message, code="not_implemented")
