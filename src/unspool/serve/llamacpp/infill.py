"""`POST /infill`: what stands between two texts, as llama.cpp's server writes it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.fill.fim import OtherFile
from unspool.serve.core.filling import InfillGap
from unspool.serve.core.options import check_choices
from unspool.serve.core.schema import ShortText, Strict
from unspool.serve.core.state import Call, state_of
from unspool.serve.http.routes import new_router
from unspool.serve.llamacpp.completion import answer_completion, completion_options
from unspool.serve.llamacpp.schema import CompletionRequest

router = new_router("llama.cpp")


class Chunk(Strict):
    """A further file, which the model reads first."""

    text: str
    filename: ShortText = "tmp"
    time: Any = None  # when an editor took it: a number, or what Vim's reltime() gives


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
    call = await state.enter(request, state.adapted_model(body.model, body.lora), n)
    between, prompt, options = await call.thread(_prepare, call, body)
    warms = body.max_tokens == 0
    texts = await call.write([prompt], options, n, gaps=[between], warms=warms)
    return await answer_completion(call, body, texts)


def _prepare(call: Call, body: InfillRequest) -> tuple[InfillGap, list[int], dict[str, Any]]:
    extra = body.input_extra or []
    left = body.input_prefix + body.prompt
    call.check_text(left, body.input_suffix, *(chunk.text for chunk in extra))
    others = tuple(OtherFile(chunk.filename, chunk.text) for chunk in extra)
    between = InfillGap(left, body.input_suffix, others)
    prompt = between.prompt(call.served.lm)
    return between, prompt, completion_options(call, body, len(prompt))
