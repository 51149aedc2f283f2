"""`POST /infill`: what stands between two texts, as llama.cpp's server writes it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.fill.fim import OtherFile
from unspool.serve.core.filling import Between
from unspool.serve.core.options import check_choices, read_schema, sampling_options
from unspool.serve.core.schema import ShortText, Strict
from unspool.serve.core.state import Call, state_of
from unspool.serve.http.events import event
from unspool.serve.http.routes import new_router
from unspool.serve.llamacpp.completion import CompletionAnswer
from unspool.serve.llamacpp.schema import CompletionRequest

router = new_router("llama.cpp")


class Chunk(Strict):
    """A further file, which the model reads first."""

    text: str
    filename: ShortText = "tmp"


class InfillRequest(CompletionRequest):
    """A gap between two texts; settings as in `/completion`."""

    prompt: str = Field("", description="further words behind input_prefix")
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Chunk], Field(max_length=256)] | None = None


@router.post("/infill", summary="Fill a gap between two texts")
async def infill(body: InfillRequest, request: Request) -> Response:
    state = state_of(request)
    n = body.n or 1
    check_choices(n, state.settings.max_choices)
    call = await state.enter(request, body.model, n)
    between, prompt, options = await call.thread(_prepare, call, body)
    texts = await call.write([prompt], options, n, gaps=[between])
    answer = CompletionAnswer(call, body, texts)
    if body.stream:
        return call.stream(answer.write, lambda error: event(error.llamacpp()))
    return await call.reply(answer.whole())


def _prepare(call: Call, body: InfillRequest) -> tuple[Between, list[int], dict[str, Any]]:
    call.heed(body)
    extra = body.input_extra or []
    left = body.input_prefix + body.prompt
    call.check_text(left, body.input_suffix, *(chunk.text for chunk in extra))
    others = tuple(OtherFile(chunk.filename, chunk.text) for chunk in extra)
    between = Between(left, body.input_suffix, others)
    prompt = between.prompt(call.served.lm)
    options = sampling_options(call.served.lm, body, top=body.n_probs)
    if body.n_probs and body.post_sampling_probs:
        options["explain"] = True
    read_schema(call, options)
    options["max_tokens"] = call.token_limit(body.max_tokens, len(prompt))
    return between, prompt, options
