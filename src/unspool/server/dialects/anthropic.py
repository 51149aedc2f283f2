"""`POST /v1/messages`: Anthropic's messages API, translated to chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from pydantic import Field, Tag
from pydantic_core import from_json
from starlette.responses import Response

from unspool.server.dialects.answers import Block, BlockAnswer, BlockGrown, BlockOpened, Change
from unspool.server.dialects.chat_prompt import (
    ChatRequest,
    PreparedChat,
    ToolUse,
    prepare_chat,
    tool_call,
)
from unspool.server.dialects.response_store import ResponseStore
from unspool.server.http.errors import ApiError, bad_request, thread_not_found
from unspool.server.http.events import Wire, event
from unspool.server.http.replies import JsonReply, ignore, new_id, new_router, to_json
from unspool.server.runtime.schema import (
    ExtensionWithSeed,
    PartialApi,
    Reasons,
    ShortText,
    Strict,
    ToolName,
    Values,
    by_type,
)
from unspool.server.runtime.state import Call, ServerState, state_of
from unspool.server.runtime.texts import RequestTexts, texts_json

# -- The request schema of `/v1/messages`

_TOOLS = "only tools that the caller runs can be used"
_CITATIONS = "there are no citations"


class CacheControl(Strict):
    """Marks a prefix to cache. All prefixes are cached anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {"citations": _CITATIONS}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    parsed_output: Any = None  # of an answer that is sent back


class _ToolBlock(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {"toolset_name": _TOOLS, "caller": _TOOLS}
    noop_values: ClassVar[Values] = {"caller": [{"type": "direct"}]}

    cache_control: CacheControl | None = None


class ToolUseBlock(_ToolBlock):
    type: Literal["tool_use"]
    id: ShortText
    name: ToolName
    input: dict[str, Any]


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer; the chat template decides whether to include it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    type: Literal["redacted_thinking"]
    data: str


TextContent = str | list[TextBlock]


class ToolResultBlock(_ToolBlock):
    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: TextContent | None = None
    is_error: bool | None = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ToolUseBlock, Tag("Use")]
    | Annotated[ToolResultBlock, Tag("Result")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[RedactedThinkingBlock, Tag("Redacted")],
    by_type(
        {
            "text": "Text",
            "tool_use": "Use",
            "tool_result": "Result",
            "thinking": "Thinking",
            "redacted_thinking": "Redacted",
        }
    ),
]


class AnthropicMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {
        "allowed_callers": _TOOLS,
        "defer_loading": "all tools are given to the model at once",
        "input_examples": "put examples into the description",
    }
    noop_values: ClassVar[Values] = {"allowed_callers": [["direct"]]}

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {"task_budget": "max_tokens is the limit"}

    format: OutputFormat | None = None
    effort: ShortText | None = Field(None, description="low, medium, high: how much to reason")


class Metadata(Strict):
    user_id: ShortText | None = None


class ThinkingConfig(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    display: Literal["summarized", "omitted"] | None = None


class CountRequest(PartialApi):
    """A conversation whose tokens are counted."""

    unsupported_fields: ClassVar[Reasons] = {
        "mcp_servers": "this server calls no other servers",
        "container": "this server runs no code",
        "context_management": "conversations are not summarized",
        "diagnostics": "there are none",
        "fallbacks": "only the requested model answers",
        "inference_geo": "everything is computed on this machine",
        "speed": "there is one speed",
        "user_profile_id": "there are no profiles",
        "workspace_id": "there are no workspaces",
        "output_format": "use output_config.format",
    }
    noop_values: ClassVar[Values] = {"speed": ["standard"], "context_management": [{"edits": []}]}

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=100_000)
    system: TextContent | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class NewThread(Strict):
    type: Literal["create"]


class ContinuedThread(Strict):
    type: Literal["continue"]
    previous_message_id: ShortText


class MessagesRequest(CountRequest):
    """A conversation to answer; if its last message is the assistant's, to continue."""

    max_tokens: int = Field(ge=1, lt=1 << 31)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    stop_sequences: list[str] | None = None
    thread: NewThread | ContinuedThread | None = Field(
        None, description="store the conversation, to continue it by the message's id"
    )
    unspool: ExtensionWithSeed | None = None
    # Accepted, but they have no effect on the text.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


# -- `POST /v1/messages`: Anthropic's messages API, and token counting

router = new_router("Anthropic")
_PING = event({"type": "ping"}, "ping")


@router.post("/v1/messages", summary="Answer a conversation")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    state, user = state_of(request), request.state.user
    if isinstance(body.thread, ContinuedThread):
        body = _continue_thread(thread_store(state), body, body.thread.previous_message_id, user)
    call = await state.enter(request, body.model)
    ready = await call.compute(_prepare, call, body)
    texts = await call.write([ready.ids], ready.options)
    store = None if body.thread is None else partial(_store_thread, thread_store(state), body, user)
    answer = _MessageAnswer(call, body, texts, ready.use, store)
    if body.stream:
        return call.stream(answer.write, lambda error: event(error.anthropic(), "error"))
    return await call.reply(answer.answer())


@router.post("/v1/messages/count_tokens", summary="Count the tokens of a conversation")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    state = state_of(request)
    async with state.call(request, body.model, places=0) as call:
        return JsonReply({"input_tokens": await call.compute(_count, call, body)})


# -- threads: stored conversations ---------------------------------------------


def thread_store(state: ServerState) -> ResponseStore:
    """The threads of a server: each reply with the conversation before it."""
    return state.extension("threads", ResponseStore)


def _continue_thread(
    threads: ResponseStore, body: MessagesRequest, previous: str, user: str
) -> MessagesRequest:
    """The request with the stored messages of its thread before its own."""
    try:
        messages, fields = threads.conversation(previous, user), threads.response(previous, user)
    except ApiError:
        raise thread_not_found() from None
    for name in ("system", "tools"):
        if getattr(body, name) is not None:
            message = f"{name} cannot change in a thread; omit it, or create a new thread"
            raise bad_request(message, name)
    stored = CountRequest.model_validate({"messages": messages, **fields["kept"]})
    update = {
        "messages": [*stored.messages, *body.messages],
        "system": stored.system,
        "tools": stored.tools,
    }
    return body.model_copy(update=update)


def _store_thread(
    threads: ResponseStore, body: MessagesRequest, user: str, message: dict[str, Any]
) -> None:
    """Store the conversation up to this reply, under the reply's id."""
    conversation = body.model_dump(include={"messages", "system", "tools"}, exclude_none=True)
    reply = {"role": "assistant", "content": message["content"]}
    fields = {name: conversation[name] for name in ("system", "tools") if name in conversation}
    entry = {"id": message["id"], "kept": fields, "output": [reply]}
    threads.add(entry, conversation["messages"], user)


# -- the request, as a chat -------------------------------------------------------------------


def _prepare(call: Call, body: MessagesRequest) -> PreparedChat:
    if body.thinking is not None and call.served.lm.thought_format is None:
        if body.thinking.type != "disabled":
            ignore(call.request, "thinking")
        body = body.model_copy(update={"thinking": None})
    output = None if body.output_config is None else body.output_config.format
    chat = _to_chat(
        body,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_tokens,
        response_format=output and {"type": output.type, "json_schema": {"schema": output.schema_}},
        unspool=body.unspool,
    )
    return prepare_chat(call, chat, top_k=body.top_k)


def _count(call: Call, body: CountRequest) -> int:
    return len(prepare_chat(call, _to_chat(body)).ids)


def _to_chat(body: CountRequest, **extra: Any) -> ChatRequest:
    messages = []
    if body.system is not None:
        messages.append({"role": "system", "content": _join_text(body.system)})
    # Consecutive messages of one role are one turn.
    for role, turns in groupby(body.messages, key=lambda message: message.role):
        messages += _turn(role, [block for turn in turns for block in _input_blocks(turn)])
    functions = [
        {"name": t.name, "description": t.description, "parameters": t.input_schema,
         "strict": t.strict}
        for t in body.tools or ()
    ]  # fmt: skip
    tools = [{"type": "function", "function": function} for function in functions]
    chat = {"messages": messages, "tools": tools, **_tool_choice(body.tool_choice), **extra}
    return ChatRequest.model_validate({**chat, **_thinking(body)})


def _thinking(body: CountRequest) -> dict[str, Any]:
    """Whether and how much to reason; by default as the model does."""
    effort = None if body.output_config is None else body.output_config.effort
    thinking = body.thinking
    if thinking is None:
        return {"reasoning_effort": effort}
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    return {"reasoning": {"enabled": True, "effort": effort, "max_tokens": thinking.budget_tokens}}


def _tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request("tool_choice needs a name if its type is tool", "tool_choice.name")
    params: dict[str, Any] = {"tool_choice": {"any": "required"}.get(choice.type, choice.type)}
    if choice.type == "tool":
        params["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if "disable_parallel_tool_use" in choice.model_fields_set:
        params["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return params


_InputBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


def _input_blocks(turn: AnthropicMessage) -> Sequence[_InputBlock]:
    if isinstance(turn.content, str):
        return [TextBlock(type="text", text=turn.content)]
    return turn.content


def _turn(role: str, blocks: Sequence[_InputBlock]) -> list[dict[str, Any]]:
    """The OpenAI messages of one turn."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    results = [_tool_result(block) for block in blocks if isinstance(block, ToolResultBlock)]
    if uses and role != "assistant":
        raise bad_request(f"a message of the {role} has a tool_use block", "messages")
    if results and role != "user":
        raise bad_request(f"a message of the {role} has a tool_result block", "messages")
    if role == "assistant":
        calls = [tool_call(use.id, use.name, json.dumps(use.input)) for use in uses]
        thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        reasoning = {"reasoning_content": thinking} if thinking else {}
        return [{"role": role, "content": "".join(texts), "tool_calls": calls or None, **reasoning}]
    messages = [{"role": role, "content": "\n\n".join(texts)}] if texts or not results else []
    return results + messages  # results belong to the calls of the previous turn


def _tool_result(block: ToolResultBlock) -> dict[str, Any]:
    text = "" if block.content is None else _join_text(block.content)
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _join_text(content: TextContent) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


# -- the message ---------------------------------------------------------------------


class _MessageAnswer(BlockAnswer):
    """A message, complete or in events."""

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
        """The complete message; stored, if it belongs to a thread."""
        content = [_block_json(block, _call_input(block)) for block in self.blocks.all]
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
        """The stop reason in Anthropic's terms."""
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
        usage = self.texts.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def _extra(self) -> dict[str, Any]:
        if self.body.unspool is None:
            return {}
        return {"unspool": texts_json(self.texts, self.body.unspool.trace)}

    async def write(self, wire: Wire) -> None:
        await self.deliver(
            lambda changes: self._start() + b"".join(e for c in changes for e in _change_events(c)),
            wire,
        )
        end = {"stop_sequence": None, "stop_details": None} | self._end()
        self._finished()
        last = {"type": "message_delta", "delta": end, "usage": self._usage()} | self._extra()
        stop = event(last, "message_delta") + event({"type": "message_stop"}, "message_stop")
        wire.write(self._start() + stop)

    def _start(self) -> bytes:
        """The first event, sent once, with the first step: then the cached tokens are known."""
        if self.started:
            return b""
        self.started = True
        message = self._message([], self._usage() | {"output_tokens": 0})
        return event({"type": "message_start", "message": message}, "message_start") + _PING


def _change_events(change: Change) -> list[bytes]:
    block = change.block
    if isinstance(change, BlockOpened):
        empty = replace(block, parts=[])  # its text follows
        return [_block_event(block, "content_block_start", content_block=_block_json(empty, {}))]
    if isinstance(change, BlockGrown):
        delta = {"type": "text_delta", "text": change.text}
        if block.is_thought:
            delta = {"type": "thinking_delta", "thinking": change.text}
        elif block.name is not None:
            delta = {"type": "input_json_delta", "partial_json": change.text}
        return [_block_event(block, "content_block_delta", delta=delta)]
    signature = {"type": "signature_delta", "signature": ""}
    events = [_block_event(block, "content_block_delta", delta=signature)]
    return [*(events if block.is_thought else ()), _block_event(block, "content_block_stop")]


def _block_event(block: Block, kind: str, **fields: Any) -> bytes:
    return event({"type": kind, "index": block.index, **fields}, kind)


def _block_json(block: Block, arguments: dict[str, Any]) -> dict[str, Any]:
    if block.is_thought:  # signatures are not checked
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.name is None:
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": arguments}


def _call_input(block: Block) -> dict[str, Any]:
    """Arguments of a call; if they are cut off, the complete part, as clients parse a stream."""
    if block.name is None:
        return {}
    try:
        arguments = from_json(block.text, allow_partial=True)
        to_json(arguments)  # fails for numbers that JSON cannot represent
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
