"""`POST /v1/chat/completions`: OpenAI's chat completions, complete or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool.engine.results import Step
from unspool.server.dialects.answers import (
    Answer,
    Block,
    BlockClosed,
    BlockGrown,
    BlockOpened,
    BlockParser,
    Change,
    MakeReader,
)
from unspool.server.dialects.chat_prompt import (
    ChatRequest,
    PreparedChat,
    ToolUse,
    check_chat,
    prepare_chat,
    streams_trace,
    template_message,
    tool_call,
)
from unspool.server.dialects.think import (
    SearchTexts,
    SearchWorker,
    begin_search,
    check_think,
    places_of,
)
from unspool.server.http.errors import bad_request
from unspool.server.http.events import EventTemplate, Wire, event
from unspool.server.http.replies import new_router
from unspool.server.runtime.schema import check_choices, finish_reason
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.texts import RequestTexts

# -- Chat completions of OpenAI's API, complete or in chunks


class _Choice:
    """One choice while it is generated."""

    def __init__(self, reader: MakeReader, one_call: bool) -> None:
        self.blocks = BlockParser(reader, one_call=one_call)
        self.started = False  # the role is sent
        self.sent_steps = 0  # of the open block, with their logprobs

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks.all if block.name is not None]

    @property
    def text_blocks(self) -> list[Block]:
        return [block for block in self.blocks.all if block.is_text]

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks.all if block.is_thought)


class ChatAnswer(Answer):
    """A chat completion, complete or in chunks."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, call: Call, body: ChatRequest, texts: RequestTexts, use: ToolUse) -> None:
        super().__init__(call, texts, body.unspool, body.stream_options)
        self.body, one_call = body, use.parallel is False
        self.choices = [
            _Choice(lambda start: use.reader(call.served, start), one_call) for _ in range(texts.n)
        ]
        self.sends_reasoning = body.reasoning is None or not body.reasoning.exclude
        self.is_live = streams_trace(body)
        self.timed, self.verbose = bool(body.timings_per_token), bool(body.verbose)
        # Most answers are text only, and need no parsing.
        self.is_plain = use.is_plain and not (body.logprobs or self.is_live or self.timed)
        self._words = EventTemplate(lambda number, text: self._delta(number, {"content": text}))

    def _logprobs(self, steps: Sequence[Step]) -> dict[str, Any] | None:
        if not self.body.logprobs or not steps:
            return None
        return self.logprob_format.chat(steps, self.served.lm.end_ids, self.body.top_logprobs or 0)

    async def answer(self) -> dict[str, Any]:
        await self.texts.finish()
        return self._complete_json(
            [self._complete_choice(number) for number in range(self.texts.n)]
        )

    def _complete_choice(self, number: int) -> dict[str, Any]:
        generation, choice = self.texts.all[number].generation, self.choices[number]
        choice.blocks.read(generation)
        content = "".join(block.text for block in choice.text_blocks)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning and self.sends_reasoning:
            message |= _reasoning_json(choice.reasoning)
        if choice.calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [
                tool_call(f"call_{block.id}", block.name or "", block.text)
                for block in choice.calls
            ]
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(
                [step for block in choice.text_blocks for step in block.steps]
            ),
            "finish_reason": finish_reason(generation.finish_reason, choice.calls),
        }

    async def write(self, wire: Wire) -> None:
        if self.body.return_progress:
            self._watch_progress(wire)
        await self.texts.deliver_final(
            lambda steps: wire.write(b"".join([self._events(*item) for item in steps])),
            wire,
            live=self.is_live,
        )
        for number, choice in enumerate(self.choices):
            if not choice.started:  # a text without tokens
                reason = finish_reason(self.texts.all[number].generation.finish_reason)
                wire.write(self._start(number) + self._delta(number, {}, None, reason))
        wire.write(self._last_events())

    def _events(self, number: int, step: Step) -> bytes:
        if self.is_plain and self.choices[number].started and not step.finish_reason:
            return self._words(number, step.text) if step.text else b""
        return b"".join(self._changes(number, step))

    def _changes(self, number: int, step: Step) -> Iterator[bytes]:
        choice = self.choices[number]
        if not choice.started:
            yield self._start(number)
        if self.is_live:
            yield self._delta(number, {"content": ""}, step=step)
        unsent: list[Step] = []
        for change in choice.blocks.push(step):
            delta = self._delta_of(choice, change)
            if isinstance(change, BlockClosed):
                unsent = change.block.steps[choice.sent_steps :] if change.block.is_text else []
                choice.sent_steps = 0
            if delta is not None:
                steps = change.steps if isinstance(change, BlockGrown) else []
                steps = steps if change.block.is_text else []
                choice.sent_steps += len(steps)
                if "content" in delta and not (self.body.logprobs or self.timed):
                    yield self._words(number, delta["content"])
                else:
                    yield self._delta(number, delta, self._logprobs(steps))
        if step.finish_reason:
            reason = finish_reason(step.finish_reason, choice.calls)
            yield self._delta(number, {}, self._logprobs(unsent), reason)

    def _delta_of(self, choice: _Choice, change: Change) -> dict[str, Any] | None:
        if change.block.is_thought and not self.sends_reasoning:
            return None
        return _change_delta(choice, change)

    def _start(self, number: int) -> bytes:
        self.choices[number].started = True
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._delta(number, delta)

    def _delta(
        self,
        number: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        step: Step | None = None,
    ) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk(choice, step)


def _change_delta(choice: _Choice, change: Change) -> dict[str, Any] | None:
    """The delta of a change; None if it sends nothing."""
    block = change.block
    if block.name is None:
        if not isinstance(change, BlockGrown):
            return None
        return _reasoning_json(change.text) if block.is_thought else {"content": change.text}
    call: dict[str, Any] = {"index": choice.calls.index(block)}
    if isinstance(change, BlockOpened):
        call |= tool_call(f"call_{block.id}", block.name, "")
    elif isinstance(change, BlockGrown):
        call["function"] = {"arguments": change.text}
    else:
        return None
    return {"tool_calls": [call]}


def _reasoning_json(text: str) -> dict[str, Any]:
    """Reasoning under the two names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


async def search_chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation with the best text that a search finds."""
    extension = body.unspool
    assert extension is not None and extension.think is not None
    check_chat(body)
    if (body.n or 1) > 1:
        raise bad_request("a search gives one answer; omit n, or unspool.think", "n")
    if extension.return_ is not None:
        raise bad_request("unspool.return cannot be combined with unspool.think", "unspool.return")
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


router = new_router("OpenAI")


@router.post("/v1/chat/completions", summary="Answer a conversation")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state = state_of(request)
    n = body.n or 1
    check_choices(n, state.settings.max_choices)
    if body.unspool is not None and body.unspool.think is not None:
        return await search_chat(body, request)
    call = await state.enter(request, state.adapted_model(body.model, body.lora), n)
    ready = await call.compute(_prepare, call, body)
    warms = ready.options["max_tokens"] == 0
    texts = await call.write([ready.ids], ready.options, n, warms=warms)
    chat = ChatAnswer(call, body, texts, ready.use)
    return call.stream(chat.write) if body.stream else await call.reply(chat.answer())


@router.post("/v1/chat/completions/input_tokens", summary="Count the tokens of a conversation")
@router.post("/chat/completions/input_tokens", include_in_schema=False)
async def count_tokens(body: ChatRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    return await call.reply(call.compute(_count, call, body))


def _count(call: Call, body: ChatRequest) -> dict[str, int]:
    return {"input_tokens": len(_prepare(call, body).ids)}


def _prepare(call: Call, body: ChatRequest) -> PreparedChat:
    check_chat(body)
    return prepare_chat(call, body)
