"""`POST /v1/messages`: answer a conversation, as Anthropic does; and count its tokens.

An adapter: the request becomes a chat of OpenAI's and goes the same way, and what comes of it is
put into Anthropic's words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from fastapi import Request
from pydantic_core import from_json
from starlette.responses import Response

from unspool.serve.anthropic.messages_schema import (
    ContinuedThread,
    CountRequest,
    Message,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    TextContent,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from unspool.serve.core.blocks import Block, Change, Grown, Opened
from unspool.serve.core.state import Call, ServerState, state_of
from unspool.serve.core.step_json import texts_json
from unspool.serve.core.texts import RequestTexts
from unspool.serve.http.errors import ApiError, bad_request, thread_not_found
from unspool.serve.http.events import event
from unspool.serve.http.notes import ignore
from unspool.serve.http.routes import JsonReply, new_id, new_router, to_json
from unspool.serve.http.wire import Wire
from unspool.serve.openai.answers import BlockAnswer
from unspool.serve.openai.chat_prompt import PreparedChat, ToolUse, prepare_chat, tool_call
from unspool.serve.openai.chat_schema import ChatRequest
from unspool.serve.openai.response_store import ResponseStore

router = new_router("Anthropic")
_PING = event({"type": "ping"}, "ping")


@router.post("/v1/messages", summary="Answer a conversation")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    state, user = state_of(request), request.state.user
    if isinstance(body.thread, ContinuedThread):
        body = _continue_thread(thread_store(state), body, body.thread.previous_message_id, user)
    call = await state.enter(request, body.model)
    ready = await call.thread(_prepare, call, body)
    texts = await call.write([ready.ids], ready.options)
    store = None if body.thread is None else partial(_store_thread, thread_store(state), body, user)
    answer = _Answer(call, body, texts, ready.use, store)
    if body.stream:
        return call.stream(answer.write, lambda error: event(error.anthropic(), "error"))
    return await call.reply(answer.answer())


@router.post("/v1/messages/count_tokens", summary="Count a conversation's tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    state = state_of(request)
    async with state.call(request, body.model, places=0) as call:
        return JsonReply({"input_tokens": await call.thread(_count, call, body)})


# -- threads: conversations that are stored here ------------------------------------------------


def thread_store(state: ServerState) -> ResponseStore:
    """The threads of a server: each reply with the conversation before it."""
    return state.extension("threads", ResponseStore)


def _continue_thread(
    threads: ResponseStore, body: MessagesRequest, previous: str, user: str
) -> MessagesRequest:
    """The request with all that its thread holds before it."""
    try:
        messages, fields = threads.conversation(previous, user), threads.response(previous, user)
    except ApiError:
        raise thread_not_found() from None
    for name in ("system", "tools"):
        if getattr(body, name) is not None:
            message = f"{name} cannot change in a thread; leave it out, or create a new thread"
            raise bad_request(message, name)
    kept = CountRequest.model_validate({"messages": messages, **fields["kept"]})
    update = {
        "messages": [*kept.messages, *body.messages],
        "system": kept.system,
        "tools": kept.tools,
    }
    return body.model_copy(update=update)


def _store_thread(
    threads: ResponseStore, body: MessagesRequest, user: str, message: dict[str, Any]
) -> None:
    """Store the conversation up to this reply, under the reply's id."""
    given = body.model_dump(include={"messages", "system", "tools"}, exclude_none=True)
    reply = {"role": "assistant", "content": message["content"]}
    kept = {name: given[name] for name in ("system", "tools") if name in given}
    entry = {"id": message["id"], "kept": kept, "output": [reply]}
    threads.add(entry, given["messages"], user)


# -- the request, as a chat -------------------------------------------------------------------


def _prepare(call: Call, body: MessagesRequest) -> PreparedChat:
    if body.thinking is not None and call.served.lm.thought_format is None:
        if body.thinking.type != "disabled":
            ignore(call.request, "thinking")
        body = body.model_copy(update={"thinking": None})
    wanted = None if body.output_config is None else body.output_config.format
    chat = _to_chat(
        body,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_tokens,
        response_format=wanted and {"type": wanted.type, "json_schema": {"schema": wanted.schema_}},
        unspool=body.unspool,
    )
    return prepare_chat(call, chat, top_k=body.top_k)


def _count(call: Call, body: CountRequest) -> int:
    return len(prepare_chat(call, _to_chat(body)).ids)


def _to_chat(body: CountRequest, **more: Any) -> ChatRequest:
    messages = []
    if body.system is not None:
        messages.append({"role": "system", "content": _join(body.system)})
    # Turns of one side in a row are one turn.
    for role, turns in groupby(body.messages, key=lambda message: message.role):
        messages += _turn(role, [block for turn in turns for block in _blocks(turn)])
    functions = [
        {"name": t.name, "description": t.description, "parameters": t.input_schema,
         "strict": t.strict}
        for t in body.tools or ()
    ]  # fmt: skip
    tools = [{"type": "function", "function": function} for function in functions]
    chat = {"messages": messages, "tools": tools, **_tool_choice(body.tool_choice), **more}
    return ChatRequest.model_validate({**chat, **_thinking(body)})


def _thinking(body: CountRequest) -> dict[str, Any]:
    """Whether to think, and how much; without a word, as is usual for the model."""
    effort = None if body.output_config is None else body.output_config.effort
    asked = body.thinking
    if asked is None:
        return {"reasoning_effort": effort}
    if asked.type == "disabled":
        return {"reasoning_effort": "none"}
    return {"reasoning": {"enabled": True, "effort": effort, "max_tokens": asked.budget_tokens}}


def _tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request("tool_choice has a name if it is of type tool", "tool_choice.name")
    found: dict[str, Any] = {"tool_choice": {"any": "required"}.get(choice.type, choice.type)}
    if choice.type == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if "disable_parallel_tool_use" in choice.model_fields_set:
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return found


_Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


def _blocks(turn: Message) -> Sequence[_Block]:
    if isinstance(turn.content, str):
        return [TextBlock(type="text", text=turn.content)]
    return turn.content


def _turn(role: str, blocks: Sequence[_Block]) -> list[dict[str, Any]]:
    """The messages that one turn comes to."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    results = [_result(block) for block in blocks if isinstance(block, ToolResultBlock)]
    if uses and role != "assistant":
        raise bad_request(f"a message of the {role} has a tool_use block", "messages")
    if results and role != "user":
        raise bad_request(f"a message of the {role} has a tool_result block", "messages")
    if role == "assistant":
        calls = [tool_call(use.id, use.name, json.dumps(use.input)) for use in uses]
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        told = {"reasoning_content": thought} if thought else {}
        return [{"role": role, "content": "".join(texts), "tool_calls": calls or None, **told}]
    words = [{"role": role, "content": "\n\n".join(texts)}] if texts or not results else []
    return results + words  # results answer the calls of the turn before, so they come first


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = "" if block.content is None else _join(block.content)
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _join(content: TextContent) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


# -- what is answered ------------------------------------------------------------------------


class _Answer(BlockAnswer):
    """A message, whole or in events."""

    def __init__(
        self,
        call: Call,
        body: MessagesRequest,
        texts: RequestTexts,
        use: ToolUse,
        store: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        super().__init__(call, texts, use)
        self.body, self.id = body, new_id("msg_", "" if store is None else call.settings.replica)
        self.store = store
        self.started = False  # the first event was sent

    async def answer(self) -> dict[str, Any]:
        await self.read()
        return self._finished() | self._extra()

    def _finished(self) -> dict[str, Any]:
        """The whole message; stored, if it belongs to a thread."""
        content = [_block(block, _input(block)) for block in self.blocks.all]
        message = self._message(content, self._usage()) | self._end()
        if self.store is not None:
            self.store(message)
        return message

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.served.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": usage,
        }

    def _end(self) -> dict[str, Any]:
        """Why the text ended, as Anthropic says it."""
        text = self.texts.all[0]
        reason, by = text.generation.finish_reason, text.stream.stopped_by
        if reason == "context":
            return {"stop_reason": "model_context_window_exceeded"}
        if reason in ("length", "interrupted"):
            return {"stop_reason": "max_tokens"}
        if by is not None and by in (self.body.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": by}
        return {"stop_reason": "tool_use" if self.blocks.has_calls else "end_turn"}

    def _usage(self) -> dict[str, Any]:
        used = self.texts.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": used["completion_tokens"],
        }

    def _extra(self) -> dict[str, Any]:
        if self.body.unspool is None:
            return {}
        return {"unspool": texts_json(self.texts, self.body.unspool.trace)}

    async def write(self, wire: Wire) -> None:
        await self.deliver(
            lambda changes: self._start() + b"".join(e for c in changes for e in _changed(c)), wire
        )
        end = {"stop_sequence": None, "stop_details": None} | self._end()
        self._finished()
        last = {"type": "message_delta", "delta": end, "usage": self._usage()} | self._extra()
        stop = event(last, "message_delta") + event({"type": "message_stop"}, "message_stop")
        wire.put(self._start() + stop)

    def _start(self) -> bytes:
        """Once, and not before the first step: that shows how much of the prompt was cached."""
        if self.started:
            return b""
        self.started = True
        message = self._message([], self._usage() | {"output_tokens": 0})
        return event({"type": "message_start", "message": message}, "message_start") + _PING


def _changed(change: Change) -> list[bytes]:
    block = change.block
    if isinstance(change, Opened):
        empty = replace(block, parts=[])  # what it has by now follows
        return [_told(block, "content_block_start", content_block=_block(empty, {}))]
    if isinstance(change, Grown):
        delta = {"type": "text_delta", "text": change.text}
        if block.is_thought:
            delta = {"type": "thinking_delta", "thinking": change.text}
        elif block.name is not None:
            delta = {"type": "input_json_delta", "partial_json": change.text}
        return [_told(block, "content_block_delta", delta=delta)]
    signed = {"type": "signature_delta", "signature": ""}
    signature = [_told(block, "content_block_delta", delta=signed)] if block.is_thought else []
    return [*signature, _told(block, "content_block_stop")]


def _told(block: Block, kind: str, **fields: Any) -> bytes:
    return event({"type": kind, "index": block.index, **fields}, kind)


def _block(block: Block, given: dict[str, Any]) -> dict[str, Any]:
    if block.is_thought:  # nobody but us wrote it, so it needs no signature
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.name is None:
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": given}


def _input(block: Block) -> dict[str, Any]:
    """A call's arguments; of those that break off, what is complete, as clients read a stream."""
    if block.name is None:
        return {}
    try:
        found = from_json(block.text, allow_partial=True)
        to_json(found)  # no number may be too large to be told
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
