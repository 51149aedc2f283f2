"""Ollama's `/api/embed`, and its older `/api/embeddings`: texts as vectors."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool.lens.embedding import embedding
from unspool.serve.core.state import Call, state_of
from unspool.serve.http.routes import new_router
from unspool.serve.ollama.schema import EmbeddingsRequest, EmbedRequest
from unspool.serve.ollama.writing import nanoseconds
from unspool.serve.openai.embeddings import check_dimensions

router = new_router("Ollama")


@router.post("/api/embed", summary="Texts as vectors")
async def embed(body: EmbedRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_embedded(call, body, perf_counter()))


@router.post("/api/embeddings", summary="A text as a vector")
async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_one(call, body.prompt))


async def _embedded(call: Call, body: EmbedRequest, entered: float) -> dict[str, Any]:
    check_dimensions(call, body.dimensions)
    texts = [body.input] if isinstance(body.input, str) else body.input
    prompts = await call.thread(_ids, call, texts, body.truncate is not False)
    vectors = await call.threads(partial(embedding, call.served.lm), prompts)
    arrived = call.request.state.arrived
    return {
        "model": body.model or call.served.name,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": nanoseconds(perf_counter() - arrived),
        "load_duration": nanoseconds(entered - arrived),
        "prompt_eval_count": sum(map(len, prompts)),
    }


async def _one(call: Call, prompt: str) -> dict[str, Any]:
    (ids,) = await call.thread(_ids, call, [prompt], True)
    (vector,) = await call.threads(partial(embedding, call.served.lm), [ids])
    return {"embedding": vector.tolist()}


def _ids(call: Call, texts: list[str], truncates: bool) -> list[list[int]]:
    """Each text in tokens; what is too long is cut, unless that is not wanted."""
    lm = call.served.lm
    if not truncates:
        for text in texts:
            call.check_text(text)
        found = [lm.prompt_ids(text) for text in texts]
        call.check_prompt(max(map(len, found)))
        return found
    most = min(lm.context, call.settings.max_prompt or lm.context)
    longest = most * call.served.longest_token  # characters that may matter
    found = [lm.tokenizer.encode_prompt(text[:longest])[:most] for text in texts]
    return [lm.prompt_ids(ids) for ids in found]
