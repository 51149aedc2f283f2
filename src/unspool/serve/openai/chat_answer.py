"""Chat completions of OpenAI's API, complete or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unspool.engine.steps import Step
from unspool.serve.core.blocks import (
    Block,
    BlockClosed,
    BlockGrown,
    BlockOpened,
    BlockParser,
    Change,
    MakeReader,
)
from unspool.serve.core.options import finish_reason
from unspool.serve.core.state import Call
from unspool.serve.core.texts import RequestTexts
from unspool.serve.http.events import EventTemplate
from unspool.serve.http.wire import Wire
from unspool.serve.openai.answers import Answer
from unspool.serve.openai.chat_prompt import ToolUse, streams_trace, tool_call
from unspool.serve.openai.chat_schema import ChatRequest


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

    # -- complete ----------------------------------------------------------------------------

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

    # -- in chunks ---------------------------------------------------------------------------

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
