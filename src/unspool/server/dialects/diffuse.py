"""`POST /v1/diffuse`: masked diffusion, which fills a text in any order, step by step.

The canvas starts masked, or with the tokens of `given`: so a client may stop at a step, set and
clear positions, and continue from there.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.diffusion.diffuse import DiffusionStream, stream_diffusion
from unspool.decoding.diffusion.result import CanvasPosition, DiffusionPass
from unspool.server.dialects.chat_prompt import Message, ToolUse, chat_prompt, template_message
from unspool.server.http.errors import bad_request
from unspool.server.http.events import error_event, event, writer_from
from unspool.server.http.replies import new_router
from unspool.server.runtime.schema import Sampling, Seed, StopStrings, Tokens, stops
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.threads import Worker

router = new_router("Diffusion")
MAX_CANDIDATES = 20
_NOT_OPTIONS = {"model", "prompt", "messages", "stream", "stop", "stages", "seed"}
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Given = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)] | None], Field(max_length=1 << 16)]


class DiffuseRequest(Sampling):
    """A prompt, and how to fill the positions after it. The default temperature is 0."""

    model: str | None = None
    prompt: str | Tokens | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    max_tokens: Count | None = Field(
        None, description="number of positions (the model's default, or 128)"
    )
    given: Given | None = Field(None, description="tokens on the canvas; null: masked")
    block: Count | None = Field(
        None, description="positions of a block; blocks are filled in order"
    )
    steps: Count | None = Field(None, description="most denoising steps of a block")
    k: Count | None = Field(None, description="fewest positions that a step sets")
    order: Literal["threshold", "factor", "entropy", "left", "fixed", "margin", "random"] | None = (
        None
    )
    threshold: Share | None = Field(None, description="probability from which a token is set (0.9)")
    factor: float | None = Field(None, ge=0)
    entropy_bound: float | None = Field(None, ge=0)
    remask: Share | None = Field(None, description="remask tokens less likely than this")
    edit: Share | None = Field(
        None, description="replace a token if another is more likely than this"
    )
    edit_passes: int | None = Field(None, ge=0, le=1024)
    guidance: float | None = Field(None, ge=0)
    cache: Literal["none", "prefix", "dual"] | None = None
    end: bool | None = None
    stop: StopStrings | None = None
    seed: Seed | None = None
    top: int = Field(0, ge=0, le=MAX_CANDIDATES, description="candidates reported at each position")
    stream: bool = False

    def options(self) -> dict[str, Any]:
        """Options of `lm.stream_diffusion`."""
        options = self.model_dump(exclude_none=True, exclude=_NOT_OPTIONS)
        if self.given is not None:
            options["given"] = self.given  # with its nulls
        if self.stages is not None:
            options["stages"] = tuple(self.stages)
        options["seed"] = secrets.randbits(32) if self.seed is None else self.seed
        return {**options, "stop": stops(self.stop)}


@router.post("/v1/diffuse", summary="Fill masked positions in any order, step by step")
async def diffuse(body: DiffuseRequest, request: Request) -> Response:
    """With `stream`: event `start` has the prompt and the canvas; each `pass` has, for every
    position of its block, the most likely token, its probability, and whether it was set or
    remasked; `done` has the text. Without it the response has all of them."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    call = await state_of(request).enter(request, body.model)
    prompt, stream = await call.compute(_open_stream, call, body)
    passes = await call.hold(Worker(stream, call.run))
    start = _start(call, body, prompt, stream)
    if body.stream:
        return call.stream(writer_from(_events(start, passes, stream)), error_event)
    return await call.reply(_complete_reply(start, passes, stream))


def _open_stream(call: Call, body: DiffuseRequest) -> tuple[list[int], DiffusionStream]:
    """Check the settings and open the stream; nothing is computed yet."""
    lm, options = call.served.lm, body.options()
    if body.messages is not None:
        messages = [template_message(message) for message in body.messages]
        call.check_text(*(str(message.get("content", "")) for message in messages))
        chat = chat_prompt(call.served, messages, ToolUse(), {})
        ids = list(chat.ids)
        options["stop"] = (*options["stop"], *lm.chat_template.stops)
    else:
        assert body.prompt is not None
        if isinstance(body.prompt, str):
            call.check_text(body.prompt)
        ids = lm.prompt_ids(body.prompt)
    call.check_prompt(len(ids))
    limit = call.settings.max_tokens
    if limit is not None:
        options["max_tokens"] = min(options.get("max_tokens", limit), limit)
    return ids, stream_diffusion(lm, ids, **options)


def _start(
    call: Call, body: DiffuseRequest, prompt: list[int], stream: DiffusionStream
) -> dict[str, Any]:
    lm = call.served.lm
    canvas = [*(body.given or ())] + [None] * (stream.length - len(body.given or ()))
    return {
        "object": "diffusion",
        "model": call.served.name,
        "prompt": [{"id": token, "text": lm.readable(token)} for token in prompt],
        "places": stream.length,
        "given": [
            None if token is None else {"token": token, "text": lm.readable(token)}
            for token in canvas
        ],
        "mask_id": lm.config.mask_id,
        "sight": lm.config.sight,
        "block": lm.config.block,
        "seed": stream.result.seed,
    }


def pass_json(diffusion_pass: DiffusionPass) -> dict[str, Any]:
    return {
        "number": diffusion_pass.number,
        "kind": diffusion_pass.kind,
        "tokens": list(diffusion_pass.tokens),
        "places": [_place_json(place) for place in diffusion_pass.places],
        "set": diffusion_pass.set,
        "taken_back": diffusion_pass.taken_back,
        "masked": diffusion_pass.masked,
        "seconds": diffusion_pass.seconds,
    }


def _place_json(place: CanvasPosition) -> dict[str, Any]:
    candidates = [
        {"token": c.token, "text": c.text, "probability": math.exp(c.logprob)}
        for c in place.candidates
    ]
    return {
        "number": place.number,
        "token": place.token,
        "text": place.text,
        "probability": place.probability,
        "change": place.change,
        "candidates": candidates,
    }


async def _events(
    start: dict[str, Any], passes: Worker[DiffusionPass], stream: DiffusionStream
) -> AsyncGenerator[bytes, None]:
    yield event(start, "start")
    async for diffusion_pass in passes:
        yield event(pass_json(diffusion_pass), "pass")
    yield event(stream.result.to_dict(), "done")


async def _complete_reply(
    start: dict[str, Any], passes: Worker[DiffusionPass], stream: DiffusionStream
) -> dict[str, Any]:
    data = [pass_json(diffusion_pass) async for diffusion_pass in passes]
    return {**start, **stream.result.to_dict(), "data": data}
