"""`unspool.think` in `/v1/chat/completions`: an answer that was searched for.

The winner is streamed as any answer is, once it is found. With `unspool.trace` the search is told
meanwhile: each event comes in a chunk without words, under `unspool.think`.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool.serve.core.state import Call, state_of
from unspool.serve.core.thinking import (
    Searching,
    ThoughtTexts,
    begin_search,
    check_think,
    places_of,
)
from unspool.serve.http.errors import bad_request
from unspool.serve.http.events import event
from unspool.serve.http.wire import Wire
from unspool.serve.openai.chat_answer import ChatAnswer
from unspool.serve.openai.chat_prompt import ToolUse, check_chat, prepare_chat, template_message
from unspool.serve.openai.chat_schema import ChatRequest


async def think_longer(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation with the best text that a search finds."""
    own = body.unspool
    assert own is not None and own.think is not None
    check_chat(body)
    if (body.n or 1) > 1:
        raise bad_request("a search gives one answer; leave n out, or unspool.think", "n")
    state = state_of(request)
    judge = check_think(own.think, state.settings)
    call = await state.enter(request, body.model, places_of(own.think))
    # A trace tells of the search here, and not of every step of the winner.
    plain = body.model_copy(
        update={"unspool": own.model_copy(update={"think": None, "trace": False})}
    )
    ready = await call.thread(prepare_chat, call, plain)
    asked = [template_message(message) for message in body.messages]
    search = await begin_search(call, own.think, judge, ready.ids, ready.options, asked)
    texts = ThoughtTexts(
        call.served,
        state.metrics,
        request.state.arrived,
        [ready.ids],
        1,
        ready.options,
        stream=search.stream,
    )
    call.hold_texts(texts)
    chat = _ThoughtAnswer(call, plain, texts, ready.use, search, tells=own.trace)
    return call.stream(chat.write) if body.stream else await call.reply(chat.answer())


class _ThoughtAnswer(ChatAnswer):
    """A chat's answer whose text is searched for first."""

    def __init__(
        self,
        call: Call,
        body: ChatRequest,
        texts: ThoughtTexts,
        use: ToolUse,
        search: Searching,
        *,
        tells: bool,
    ) -> None:
        super().__init__(call, body, texts, use)
        self._search, self._tells, self._thought_texts = search, tells, texts

    async def answer(self) -> dict[str, Any]:
        async for found in self._search:
            if self._tells:
                self._thought_texts.events.append(found.to_dict())
        await self.texts.start()
        return await super().answer()

    async def write(self, wire: Wire) -> None:
        if self._tells:
            wire.put(self._start(0))
        async for found in self._search:
            if self._tells:
                if wire.is_full:
                    await wire.drain()
                wire.put(self._told(found.to_dict()))
        await self.texts.start()
        await super().write(wire)

    def _told(self, told: dict[str, Any]) -> bytes:
        choice = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}
        chunk = self._envelope(self.chunk_kind, [choice])
        return event({**chunk, "unspool": {"think": told}})

    def _extension_json(self, trace: bool) -> dict[str, Any]:
        found = super()._extension_json(trace)
        thought = self._thought_texts.thought
        assert thought is not None
        found["think"] = thought_json(thought.to_dict())
        if self._thought_texts.events:
            found["think"]["events"] = self._thought_texts.events
        return found


def thought_json(thought: dict[str, Any]) -> dict[str, Any]:
    """What a search came to, without the text itself, which the answer has."""
    names = ("policy", "score", "why", "budget", "spent", "answers", "seconds")
    return {name: thought[name] for name in names if name in thought}
