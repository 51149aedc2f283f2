"""`unspool.think` in `/v1/chat/completions`: an answer found by search.

The winner is streamed like any answer, once it is found. With `unspool.trace` the events of the
search are sent before, each in a chunk without text, under `unspool.think`.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool.serve.core.state import Call, state_of
from unspool.serve.core.thinking import (
    SearchTexts,
    SearchWorker,
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


async def search_chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation with the best text that a search finds."""
    extension = body.unspool
    assert extension is not None and extension.think is not None
    check_chat(body)
    if (body.n or 1) > 1:
        raise bad_request("a search gives one answer; omit n, or unspool.think", "n")
    state = state_of(request)
    judge = check_think(extension.think, state.settings)
    call = await state.enter(request, body.model, places_of(extension.think))
    # A trace here reports the search, and not every step of the winner.
    without_trace = extension.model_copy(update={"think": None, "trace": False})
    plain = body.model_copy(update={"unspool": without_trace})
    ready = await call.compute(prepare_chat, call, plain)
    messages = [template_message(message) for message in body.messages]
    search = await begin_search(call, extension.think, judge, ready.ids, ready.options, messages)
    texts = SearchTexts(
        call.served,
        state.metrics,
        request.state.arrived,
        [ready.ids],
        1,
        ready.options,
        stream=search.stream,
    )
    call.hold_texts(texts)
    chat = _SearchAnswer(call, plain, texts, ready.use, search, trace=extension.trace)
    return call.stream(chat.write) if body.stream else await call.reply(chat.answer())


class _SearchAnswer(ChatAnswer):
    """The answer to a chat, found by search."""

    def __init__(
        self,
        call: Call,
        body: ChatRequest,
        texts: SearchTexts,
        use: ToolUse,
        search: SearchWorker,
        *,
        trace: bool,
    ) -> None:
        super().__init__(call, body, texts, use)
        self._search, self._trace_search, self._search_texts = search, trace, texts

    async def answer(self) -> dict[str, Any]:
        async for search_event in self._search:
            if self._trace_search:
                self._search_texts.events.append(search_event.to_dict())
        await self.texts.start()
        return await super().answer()

    async def write(self, wire: Wire) -> None:
        if self._trace_search:
            wire.write(self._start(0))
        async for search_event in self._search:
            if self._trace_search:
                if wire.is_full:
                    await wire.drain()
                wire.write(self._search_chunk(search_event.to_dict()))
        await self.texts.start()
        await super().write(wire)

    def _search_chunk(self, event_json: dict[str, Any]) -> bytes:
        choice = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}
        chunk = self._envelope(self.chunk_kind, [choice])
        return event({**chunk, "unspool": {"think": event_json}})

    def _extension_json(self, trace: bool) -> dict[str, Any]:
        extension = super()._extension_json(trace)
        result = self._search_texts.result
        assert result is not None
        extension["think"] = search_json(result.to_dict())
        if self._search_texts.events:
            extension["think"]["events"] = self._search_texts.events
        return extension


def search_json(result: dict[str, Any]) -> dict[str, Any]:
    """The result of a search without the text, which the answer has."""
    names = ("policy", "score", "why", "budget", "spent", "answers", "seconds")
    return {name: result[name] for name in names if name in result}
