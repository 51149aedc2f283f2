"""`POST /v1/think`: a search for a better text, event by event.

The page draws these events: every text tried, its score, what is pruned, and the tokens spent.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.think.think import default_max_tokens
from unspool.serve.core.schema import Sampling, Seed, StopStrings, Think, Tokens, stops
from unspool.serve.core.state import Call, state_of
from unspool.serve.core.thinking import (
    SearchWorker,
    begin_search,
    budget_of,
    check_think,
    places_of,
)
from unspool.serve.http.errors import bad_request
from unspool.serve.http.events import error_event, event, writer_from
from unspool.serve.http.routes import new_router
from unspool.serve.openai.chat_prompt import ToolUse, chat_prompt, template_message
from unspool.serve.openai.chat_schema import Message

router = new_router("Thinking")
_NOT_OPTIONS = {"model", "prompt", "messages", "think", "stream", "stop", "stages", "seed"}


class ThinkRequest(Sampling):
    """A prompt or a conversation, and how to search for its continuation."""

    model: str | None = None
    prompt: str | Tokens | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    think: Think = Field(default_factory=lambda: Think.model_validate({}))
    max_tokens: int | None = Field(
        None, ge=1, lt=1 << 31, description="of each text (256; think and compose: the budget)"
    )
    stop: StopStrings | None = None
    seed: Seed | None = None
    stream: bool = False

    def options(self) -> dict[str, Any]:
        """Options of `lm.stream`."""
        options = self.model_dump(exclude_none=True, exclude=_NOT_OPTIONS)
        if self.stages is not None:
            options["stages"] = tuple(self.stages)
        options["seed"] = secrets.randbits(32) if self.seed is None else self.seed
        return {**options, "stop": stops(self.stop)}


@router.post("/v1/think", summary="Search for a better text, with its events")
async def think(body: ThinkRequest, request: Request) -> Response:
    """With `stream`: event `start` has the prompt and the parameters; then `grown`, `judged`,
    `pruned` and `spending` as they happen, `won`, and `done` with the winner and the tokens spent.
    Without it the response has all events under `data`."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    state = state_of(request)
    judge = check_think(body.think, state.settings)
    call = await state.enter(request, body.model, places_of(body.think))
    options = body.options()
    ids, messages = await call.compute(_prompt, call, body, options)
    limit = default_max_tokens(body.think.policy, body.max_tokens)
    options["max_tokens"] = call.token_limit(limit, len(ids), budget_of(body.think, call.settings))
    search = await begin_search(call, body.think, judge, ids, options, messages)
    start = _start(call, body, ids, options["seed"])
    if body.stream:
        return call.stream(writer_from(_events(start, search)), error_event)
    return await call.reply(_complete_reply(start, search))


def _prompt(
    call: Call, body: ThinkRequest, options: dict[str, Any]
) -> tuple[list[int], list[dict[str, Any]] | None]:
    """The prompt as token ids, and the messages of a conversation."""
    if body.messages is None:
        assert body.prompt is not None
        if isinstance(body.prompt, str):
            call.check_text(body.prompt)
        return call.served.lm.prompt_ids(body.prompt), None
    messages = [template_message(message) for message in body.messages]
    call.check_text(*(str(message.get("content", "")) for message in messages))
    return list(chat_prompt(call.served, messages, ToolUse(), options).ids), messages


def _start(call: Call, body: ThinkRequest, ids: list[int], seed: int) -> dict[str, Any]:
    lm = call.served.lm
    return {
        "object": "search",
        "model": call.served.name,
        "prompt": [{"id": token, "text": lm.readable(token)} for token in ids],
        **body.think.model_dump(),
        "budget": budget_of(body.think, call.settings),
        "max_tokens": default_max_tokens(body.think.policy, body.max_tokens),
        "seed": seed,
    }


async def _events(start: dict[str, Any], search: SearchWorker) -> AsyncGenerator[bytes, None]:
    yield event(start, "start")
    async for search_event in search:
        event_json = search_event.to_dict()
        yield event(event_json, event_json["event"])
    yield event(search.stream.result.to_dict(), "done")


async def _complete_reply(start: dict[str, Any], search: SearchWorker) -> dict[str, Any]:
    events = [search_event.to_dict() async for search_event in search]
    return {**start, **search.stream.result.to_dict(), "data": events}
