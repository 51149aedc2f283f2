"""Ollama's `/api/embed`, and its older `/api/embeddings`."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool.lens.embedding import embedding
from unspool.serve.core.state import Call, state_of
from unspool.serve.ollama.schema import EmbeddingsRequest, EmbedRequest
from unspool.serve.ollama.writing import nanoseconds, router
from unspool.serve.openai.embeddings import check_dimensions


@router.post("/api/embed", summary="Embed texts")
async def embed(body: EmbedRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_embed_texts(call, body, perf_counter()))


@router.post("/api/embeddings", summary="Embed a text")
async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_embed_prompt(call, body.prompt))


async def _embed_texts(call: Call, body: EmbedRequest, entered: float) -> dict[str, Any]:
    check_dimensions(call, body.dimensions)
    texts = [body.input] if isinstance(body.input, str) else body.input
    prompts = await call.compute(_encode_texts, call, texts, body.truncate is not False)
    vectors = await call.compute_all(partial(embedding, call.served.lm), prompts)
    arrived = call.request.state.arrived
    return {
        "model": body.model or call.served.name,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": nanoseconds(perf_counter() - arrived),
        "load_duration": nanoseconds(entered - arrived),
        "prompt_eval_count": sum(map(len, prompts)),
    }


async def _embed_prompt(call: Call, prompt: str) -> dict[str, Any]:
    (ids,) = await call.compute(_encode_texts, call, [prompt], True)
    (vector,) = await call.compute_all(partial(embedding, call.served.lm), [ids])
    return {"embedding": vector.tolist()}


def _encode_texts(call: Call, texts: list[str], truncates: bool) -> list[list[int]]:
    """Tokenize each text; truncate long ones, or reject them if `truncates` is false."""
    lm = call.served.lm
    if not truncates:
        for text in texts:
            call.check_text(text)
        prompts = [lm.prompt_ids(text) for text in texts]
        call.check_prompt(max(map(len, prompts)))
        return prompts
    max_tokens = min(lm.context, call.settings.max_prompt or lm.context)
    max_length = max_tokens * call.served.longest_token  # further characters cannot fit
    prompts = [lm.tokenizer.encode_prompt(text[:max_length])[:max_tokens] for text in texts]
    return [lm.prompt_ids(ids) for ids in prompts]
