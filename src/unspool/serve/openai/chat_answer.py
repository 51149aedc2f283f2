"""The answer to a conversation as OpenAI gives it, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unspool.engine.steps import Step
from unspool.serve.core.blocks import (
    Block,
    BlockParser,
    Change,
    Closed,
    Grown,
    MakeReader,
    Opened,
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
    """One answer as it grows."""

    def __init__(self, reader: MakeReader, one_call: bool) -> None:
        self.blocks = BlockParser(reader, one_call=one_call)
        self.started = False  # the role was sent
        self.sent_steps = 0  # of the open block, with their log-probabilities

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks.all if block.name is not None]

    @property
    def words(self) -> list[Block]:
        return [block for block in self.blocks.all if block.is_words]

    @property
    def thought(self) -> str:
        return "".join(block.text for block in self.blocks.all if block.is_thought)


class ChatAnswer(Answer):
    """A chat's answer, whole or in chunks."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, call: Call, body: ChatRequest, texts: RequestTexts, use: ToolUse) -> None:
        super().__init__(call, texts, body.unspool, body.stream_options)
        self.body, one_call = body, use.parallel is False
        self.choices = [
            _Choice(lambda start: use.reader(call.served, start), one_call) for _ in range(texts.n)
        ]
        self.tells_thoughts = body.reasoning is None or not body.reasoning.exclude
        self.is_live = streams_trace(body)
        self.timed, self.verbose = bool(body.timings_per_token), bool(body.verbose)
        # Words and nothing else, which most answers are: known without a look at each.
        self.is_plain = use.is_plain and not (body.logprobs or self.is_live or self.timed)
        self._words = EventTemplate(lambda number, text: self._delta(number, {"content": text}))

    def _logprobs(self, steps: Sequence[Step]) -> dict[str, Any] | None:
        if not self.body.logprobs or not steps:
            return None
        return self.logprob_format.chat(steps, self.served.lm.end_ids, self.body.top_logprobs or 0)

    # -- whole -------------------------------------------------------------------------------

    async def answer(self) -> dict[str, Any]:
        await self.texts.finish()
        return self._whole_json([self._whole(number) for number in range(self.texts.n)])

    def _whole(self, number: int) -> dict[str, Any]:
        generation, choice = self.texts.all[number].generation, self.choices[number]
        choice.blocks.read(generation)
        content = "".join(block.text for block in choice.words)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.thought and self.tells_thoughts:
            message |= _thought(choice.thought)
        if choice.calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [
                tool_call(f"call_{block.id}", block.name or "", block.text)
                for block in choice.calls
            ]
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs([step for block in choice.words for step in block.steps]),
            "finish_reason": finish_reason(generation.finish_reason, choice.calls),
        }

    # -- in chunks ---------------------------------------------------------------------------

    async def write(self, wire: Wire) -> None:
        if self.body.return_progress:
            self._watch_progress(wire)
        await self.texts.deliver_final(
            lambda steps: wire.put(b"".join([self._events(*each) for each in steps])),
            wire,
            live=self.is_live,
        )
        for number, choice in enumerate(self.choices):
            if not choice.started:  # a text without a single token has ended all the same
                reason = finish_reason(self.texts.all[number].generation.finish_reason)
                wire.put(self._start(number) + self._delta(number, {}, None, reason))
        wire.put(self._last_events())

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
        rest: list[Step] = []
        for change in choice.blocks.push(step):
            delta = self._delta_of(choice, change)
            if isinstance(change, Closed):
                rest = change.block.steps[choice.sent_steps :] if change.block.is_words else []
                choice.sent_steps = 0
            if delta is not None:
                steps = change.steps if isinstance(change, Grown) else []
                steps = steps if change.block.is_words else []
                choice.sent_steps += len(steps)
                if "content" in delta and not (self.body.logprobs or self.timed):
                    yield self._words(number, delta["content"])
                else:
                    yield self._delta(number, delta, self._logprobs(steps))
        if step.finish_reason:
            reason = finish_reason(step.finish_reason, choice.calls)
            yield self._delta(number, {}, self._logprobs(rest), reason)

    def _delta_of(self, choice: _Choice, change: Change) -> dict[str, Any] | None:
        if change.block.is_thought and not self.tells_thoughts:
            return None
        return _changed(choice, change)

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


def _changed(choice: _Choice, change: Change) -> dict[str, Any] | None:
    """What a change adds to the message; None: nothing that clients are told of."""
    block = change.block
    if block.name is None:
        if not isinstance(change, Grown):
            return None
        return _thought(change.text) if block.is_thought else {"content": change.text}
    call: dict[str, Any] = {"index": choice.calls.index(block)}
    if isinstance(change, Opened):
        call |= tool_call(f"call_{block.id}", block.name, "")
    elif isinstance(change, Grown):
        call["function"] = {"arguments": change.text}
    else:
        return None
    return {"tool_calls": [call]}


def _thought(text: str) -> dict[str, Any]:
    """A thought by the two names that clients know."""
    return {"reasoning_content": text, "reasoning": text}
