"""`POST /infill`: fill in the middle, as in llama.cpp's server."""

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
from unspool.serve.llamacpp.completion import answer_completion, completion_options, router
from unspool.serve.llamacpp.schema import LlamaCompletionRequest


class ExtraFile(Strict):
    """A further file, which the model reads first."""

    text: str
    filename: ShortText = "tmp"
    time: Any = None  # of the copy: a number, or the result of Vim's reltime()


class InfillRequest(LlamaCompletionRequest):
    """A gap between two texts; settings as in `/completion`."""

    prompt: str = Field("", description="further text after input_prefix")
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=256)] | None = None


@router.post("/infill", summary="Fill a gap between two texts")
async def infill(body: InfillRequest, request: Request) -> Response:
    state = state_of(request)
    n = body.n or 1
    check_choices(n, state.settings.max_choices)
    call = await state.enter(request, state.adapted_model(body.model, body.lora), n)
    gap, prompt, options = await call.compute(_prepare_infill, call, body)
    warms = body.max_tokens == 0
    texts = await call.write([prompt], options, n, gaps=[gap], warms=warms)
    return await answer_completion(call, body, texts)


def _prepare_infill(call: Call, body: InfillRequest) -> tuple[InfillGap, list[int], dict[str, Any]]:
    extra = body.input_extra or []
    prefix = body.input_prefix + body.prompt
    call.check_text(prefix, body.input_suffix, *(chunk.text for chunk in extra))
    others = tuple(OtherFile(chunk.filename, chunk.text) for chunk in extra)
    gap = InfillGap(prefix, body.input_suffix, others)
    prompt = gap.prompt(call.served.lm)
    return gap, prompt, completion_options(call, body, len(prompt))
