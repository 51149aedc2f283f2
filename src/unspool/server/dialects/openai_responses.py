"""`/v1/responses`: OpenAI's responses, stored so that the next request can continue them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Query, Request
from pydantic import Field, StringConstraints, Tag
from starlette.responses import Response

from unspool.engine.results import Step
from unspool.server.dialects.answers import (
    Block,
    BlockAnswer,
    BlockGrown,
    BlockOpened,
    Change,
    LogprobFormat,
    was_cut,
)
from unspool.server.dialects.chat_prompt import (
    MAX_TOP_LOGPROBS,
    AllowedToolsChoice,
    ChatRequest,
    PreparedChat,
    ToolUse,
    prepare_chat,
    tool_call,
)
from unspool.server.dialects.response_store import ResponseStore
from unspool.server.http.errors import ApiError, bad_request, unsupported
from unspool.server.http.events import EventStream, Wire, event
from unspool.server.http.replies import JsonReply, ignore, new_id, new_router
from unspool.server.runtime.schema import (
    Constraints,
    ExtensionWithSeed,
    ForeignRequest,
    PartialApi,
    Reasons,
    Seed,
    ShortText,
    Strict,
    ToolName,
    Values,
    by_type,
    check_stream_options,
)
from unspool.server.runtime.state import Call, ServerState, state_of
from unspool.server.runtime.texts import RequestTexts, texts_json
from unspool.text.chat.messages import ONLY_TEXT

# -- The request schema of `/v1/responses`

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # accepted, but reasoning is never encrypted
_FOREGROUND = "a response is generated while its request is open"
_FUNCTIONS = "only functions, which the caller runs, can be called"
Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    # Of an output that is sent back as input; not for the model.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


Content = str | list[TextPart]


class MessageItem(Strict):
    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: ShortText | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {
        "namespace": _FUNCTIONS,
        "caller": _FUNCTIONS,
        "async": _FOREGROUND,
    }
    noop_values: ClassVar[Values] = {"caller": [{"type": "direct"}]}

    type: Literal["function_call"]
    call_id: ShortText
    name: ToolName
    arguments: str = Field(description="JSON text")
    id: ShortText | None = None
    status: Status | None = None
    parsed_arguments: Any = None


class FunctionCallOutputItem(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {"namespace": _FUNCTIONS, "caller": _FUNCTIONS}
    noop_values: ClassVar[Values] = {"caller": [{"type": "direct"}]}

    type: Literal["function_call_output"]
    call_id: ShortText
    output: Content
    id: ShortText | None = None
    name: str | None = None
    status: Status | None = None


class ReasoningPart(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """Reasoning of an earlier answer; the chat template decides whether to include it."""

    type: Literal["reasoning"]
    id: ShortText | None = None
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: None = None
    status: Status | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[FunctionCallItem, Tag("Call")]
    | Annotated[FunctionCallOutputItem, Tag("Output")],
    by_type(
        {
            "message": "Message",
            "function_call": "Call",
            "function_call_output": "Output",
            "reasoning": "Reasoning",
        },
        default="message",
    ),
]


class ResponseFunctionTool(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {
        "defer_loading": "all tools are given to the model at once",
        "allowed_callers": _FUNCTIONS,
        "output_schema": "it is not in the prompt",
    }
    noop_values: ClassVar[Values] = {"allowed_callers": [["direct"]]}

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: ShortText | None = None  # has no effect


class ResponseReasoning(Strict):
    effort: ShortText | None = Field(None, description="none, low, medium, high")
    summary: ShortText | None = None
    generate_summary: ShortText | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = None  # none is added


class ResponseRequest(ForeignRequest, Constraints):
    """Input to answer."""

    unsupported_fields: ClassVar[Reasons] = {
        "background": _FOREGROUND,
        "context_management": "conversations are not summarized",
        "conversation": "use previous_response_id",
        "image": ONLY_TEXT,
        "max_tool_calls": "there are no built-in tools",
        "moderation": "there is no moderation",
        "prompt": "prompt templates are not stored; send the input itself",
        "prompt_cache_options": "prefixes are cached automatically",
        "access_programs": "there are none",
    }

    model: str | None = None
    input: str | Annotated[list[Item], Field(max_length=10_000)] | None = None
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    store: bool | None = Field(None, description="false: do not store the response")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    seed: Seed | None = None
    reasoning: ResponseReasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = Field(None, description=f"{LOGPROBS}, or nothing")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    text: TextConfig | None = None
    tools: list[ResponseFunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedToolsChoice | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: drop the oldest items if the conversation is too long"
    )
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    unspool: ExtensionWithSeed | None = None
    # Accepted, but they have no effect on the text.
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None


# -- Input items of `/v1/responses`: as they are stored, and as messages for chat templates

Items = Sequence[dict[str, Any]]


def items_of(value: str | Sequence[Item] | None) -> list[dict[str, Any]]:
    """The input of a request as items with ids."""
    if value is None:
        return []
    if isinstance(value, str):
        value = [MessageItem(role="user", content=value)]
    return [_item_json(item) for item in value]


def _item_json(item: Item) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        content = _parts(item.content, is_output=item.role == "assistant")
        prefix, fields = "msg_", {"type": "message", "role": item.role, "content": content}
    elif isinstance(item, FunctionCallItem):
        prefix = "fc_"
        fields = item.model_dump(include={"type", "call_id", "name", "arguments"})
    elif isinstance(item, ReasoningItem):
        parts = [part.model_dump() for part in item.content or ()]
        prefix, fields = "rs_", {"type": "reasoning", "summary": [], "content": parts}
    else:
        prefix, fields = "fco_", item.model_dump(include={"type", "call_id"})
        fields["output"] = _join_text(item.output)
    return {"id": item.id or new_id(prefix), "status": "completed", **fields}


def _parts(content: Content, *, is_output: bool) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    if is_output:
        return [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return [{"type": "input_text", "text": text} for text in texts]


def _join_text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def drop_oldest(items: Items, count: int) -> list[dict[str, Any]]:
    """The items without the first `count`. Instructions stay; a call's result goes with it."""
    dropped = {item["call_id"] for item in items[:count] if item["type"] == "function_call"}
    first = [item for item in items[:count] if item.get("role") in ("system", "developer")]
    last = [
        item
        for item in items[count:]
        if item["type"] != "function_call_output" or item["call_id"] not in dropped
    ]
    return [*first, *last]


def messages_of(instructions: str | None, items: Items) -> list[dict[str, Any]]:
    """A conversation as messages for chat templates."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    reasoning = ""  # of the next assistant message
    for item in items:
        if item["type"] == "reasoning":
            reasoning = "".join(part["text"] for part in item["content"])
        elif item["type"] == "message":
            _add_message(messages, item)
        elif item["type"] == "function_call":
            call = tool_call(item["call_id"], item["name"], item["arguments"])
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            messages.append(result)
        is_answer = item["type"] != "reasoning" and messages[-1]["role"] == "assistant"
        if reasoning and is_answer:
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    role = "system" if item["role"] == "developer" else item["role"]
    content = "".join(part["text"] for part in item["content"])
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        # Many templates take only one system message, at the beginning.
        messages[0]["content"] += "\n\n" + content
    else:
        messages.append({"role": role, "content": content})


# -- `/v1/responses`: OpenAI's responses, stored so that the next request can continue them

router = new_router("OpenAI")


def response_store(state: ServerState) -> ResponseStore:
    """The responses that a server stores."""
    return state.extension("responses", ResponseStore)


def _conversation(body: ResponseRequest, stored: ResponseStore, user: str) -> list[dict[str, Any]]:
    """The items of the previous response, if one is named, and those of this request."""
    previous = body.previous_response_id
    earlier = () if previous is None else stored.conversation(previous, user)
    return [*earlier, *items_of(body.input)]


@router.post("/responses", include_in_schema=False)
@router.post("/v1/responses", summary="Create a response, and store it")
async def create_response(body: ResponseRequest, request: Request) -> Response:
    state, user = state_of(request), request.state.user
    stored = response_store(state)
    items = _conversation(body, stored, user)
    call = await state.enter(request, body.model)
    ready = await call.compute(_prepare, call, body, items)
    texts = await call.write([ready.ids], ready.options)
    store = None
    if body.store is not False:
        store = partial(stored.add, items=items, user=user)
    answer = _ResponseAnswer(call, body, texts, ready.use, store)
    await call.hold(stored.running(answer.id, answer, user))
    if body.stream:
        return call.stream(answer.write, answer.failed)
    return await call.reply(answer.answer())


@router.post("/v1/responses/input_tokens", summary="Count the tokens of a response's input")
async def count_input_tokens(body: ResponseRequest, request: Request) -> Response:
    state = state_of(request)
    items = _conversation(body, response_store(state), request.state.user)
    async with state.call(request, body.model) as call:
        ready: PreparedChat = await call.compute(_prepare, call, body, items)
    return JsonReply({"object": "response.input_tokens", "input_tokens": len(ready.ids)})


@router.get("/v1/responses/{response_id}", summary="A stored response, or one in progress")
async def get_response(
    response_id: str,
    request: Request,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=1 << 31)] = None,
    include_obfuscation: bool | None = None,
) -> Response:
    """With `stream`, a finished response is sent again as events."""
    _check_query(request, "stream", "starting_after", "include_obfuscation")
    store, user = response_store(state_of(request)), request.state.user
    running = store.find_running(response_id, user)
    if not stream:
        return JsonReply(
            store.response(response_id, user) if running is None else running.progress()
        )
    if running is not None:
        message = "this response is still in progress; read it when it is finished"
        raise ApiError(409, message, param="stream", code="response_in_progress")
    response = store.response(response_id, user)
    events = _replay_events(response)[0 if starting_after is None else starting_after + 1 :]

    async def write(wire: Wire) -> None:
        wire.write(b"".join(events))

    return EventStream(write, until=None, failed=lambda error: event(error.openai()))


@router.post("/v1/responses/{response_id}/cancel", summary="Cancel a response in progress")
async def cancel_response(response_id: str, request: Request) -> Response:
    """A finished response is returned unchanged."""
    store, user = response_store(state_of(request)), request.state.user
    running = store.find_running(response_id, user)
    if running is None:
        return JsonReply(store.response(response_id, user))
    return JsonReply(running.cancel())


@router.delete("/v1/responses/{response_id}", summary="Delete a response")
async def delete_response(response_id: str, request: Request) -> Response:
    response_store(state_of(request)).delete(response_id, request.state.user)
    return JsonReply({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", summary="The input items of a response")
async def input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    _check_query(request, "limit", "order", "after")
    items = [*response_store(state_of(request)).items(response_id, request.state.user)]
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise bad_request(f"no such item: {after[:80]!r}", "after")
        items = items[place + 1 :]
    page = items[:limit]
    reply = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
    return JsonReply(reply)


def _check_query(request: Request, *names: str) -> None:
    """Reject unknown query parameters. Stored responses are returned unchanged, so `include` only
    has to be valid."""
    for name, value in request.query_params.multi_items():
        if name in ("include", "include[]"):
            _check_include([value])
        elif name not in names:
            raise unsupported(name[:80], "stored responses are returned unchanged")


def _check_include(names: Iterable[str]) -> None:
    for name in names:
        if name not in (LOGPROBS, ENCRYPTED):
            raise unsupported(f"include of {name[:60]!r}", f"allowed: {LOGPROBS}")


# -- the request, as a chat -------------------------------------------------------------------

_TOO_LONG = "context_length_exceeded"


def _prepare(call: Call, body: ResponseRequest, items: list[dict[str, Any]]) -> PreparedChat:
    """Translate the request to a chat. With `truncation: auto`, the oldest items of a conversation
    that does not fit are dropped: as few as possible, and never the last one."""
    if body.truncation != "auto":
        return _prepare_items(call, body, items)
    context = call.served.lm.context
    room = min(body.max_output_tokens or context // 4, context // 2)

    def prepare_without(count: int, limit: int) -> PreparedChat | None:
        """The chat without its first `count` items; None if it has more tokens than `limit`."""
        try:
            ready = _prepare_items(call, body, drop_oldest(items, count))
        except ApiError as error:
            if error.code != _TOO_LONG:
                raise
            return None
        return ready if len(ready.ids) <= limit else None

    if (ready := prepare_without(0, context - 1)) is not None:
        return ready
    low, high = 1, max(0, len(items) - 1)
    while low < high:  # the fewest that fit, or all but the last
        middle = (low + high) // 2
        fits = prepare_without(middle, context - room) is not None
        low, high = (low, middle) if fits else (middle + 1, high)
    call.note(f"truncation: the first {high} of {len(items)} items were dropped")
    return _prepare_items(call, body, drop_oldest(items, high))


def _prepare_items(call: Call, body: ResponseRequest, items: list[dict[str, Any]]) -> PreparedChat:
    _check_include(body.include or ())
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise bad_request(f"top_logprobs needs include: [{LOGPROBS!r}]", "top_logprobs")
    check_stream_options(body)
    if not items:
        raise bad_request("input is missing; it is required", "input", "missing_required_parameter")
    choice = _echoed(body.tool_choice)
    text_format = None if body.text is None else body.text.format
    if isinstance(choice, dict) and choice["type"] == "function":
        choice = {"type": "function", "function": {"name": choice["name"]}}
    functions = [tool.model_dump(exclude={"type"}) for tool in body.tools or ()]
    chat = {
        "messages": messages_of(body.instructions, items),
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if text_format is None else _response_format(text_format),
        "top_logprobs": body.top_logprobs,
        "max_tokens": body.max_output_tokens,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "unspool": body.unspool,
        "seed": body.seed,
        **body.model_dump(include={*Constraints.model_fields}),
    }
    call.apply_hints(body)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        ignore(call.request, "text.verbosity")
    return prepare_chat(call, ChatRequest.model_validate(chat))


def _response_format(text_format: TextFormat) -> dict[str, Any]:
    schema = {"schema": text_format.schema_, "strict": text_format.strict}
    is_free = text_format.schema_ is None
    return {"type": text_format.type, "json_schema": None if is_free else schema}


# -- the response ---------------------------------------------------------------------


# Default values of a response; and the fields it repeats from the request.
_FIXED = {
    "object": "response", "background": False, "completed_at": None, "error": None,
    "incomplete_details": None, "max_tool_calls": None, "usage": None,
    "service_tier": "default",
}  # fmt: skip
_ECHOED = {
    "instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key",
    "prompt_cache_retention", "safety_identifier", "user",
}  # fmt: skip


class _ResponseAnswer(BlockAnswer):
    """A response, complete or in events."""

    def __init__(
        self,
        call: Call,
        body: ResponseRequest,
        texts: RequestTexts,
        use: ToolUse,
        store: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        super().__init__(call, texts, use, never_empty=True)
        self.body, self.store = body, store
        self.id, self.created = new_id("resp_", call.settings.replica), int(time.time())
        self.logprob_format = LogprobFormat(call.served.lm.tokenizer)
        self.number = 0  # of the next event
        self.is_cancelled = False

    # -- complete ----------------------------------------------------------------------------

    async def answer(self) -> dict[str, Any]:
        await self.read()
        return self._finished()

    def progress(self) -> dict[str, Any]:
        """The response so far."""
        return self._response("cancelled" if self.is_cancelled else "in_progress")

    def cancel(self) -> dict[str, Any]:
        """Stop generation; the text so far stays. The request that reads it ends as well."""
        self.is_cancelled = True
        self.texts.close()
        return self.progress()

    def _finished(self) -> dict[str, Any]:
        """The finished response; it is stored too."""
        is_cut = was_cut(self.generation.finish_reason)
        response = self._response("incomplete" if is_cut else "completed")
        if self.is_cancelled:
            response["status"] = "cancelled"
        elif is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = self._usage()
        if self.store is not None:
            self.store(response)
        if self.body.unspool is not None:  # not stored: a trace is large
            response = {**response, "unspool": texts_json(self.texts, self.body.unspool.trace)}
        return response

    def _response(self, status: str) -> dict[str, Any]:
        """The response so far, with this status."""
        body, settings = self.body, self.generation.settings
        text_format = None if body.text is None else body.text.format
        return {
            "id": self.id,
            "created_at": self.created,
            "status": status,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
            "output": [self._item(block) for block in self.blocks.all],
            **_FIXED,
            **body.model_dump(include=_ECHOED),
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "store": body.store is not False,
            "truncation": body.truncation or "disabled",
            "temperature": settings.temperature,
            "text": {"format": _echoed(text_format) or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": _echoed(body.tool_choice) or "auto",
            "tools": [_echoed(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": settings.top_p,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.texts.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": usage["total_tokens"],
        }

    def _logprobs(self, steps: list[Step]) -> list[dict[str, Any]]:
        if LOGPROBS not in (self.body.include or ()):
            return []
        end_ids, top = self.served.lm.end_ids, self.body.top_logprobs or 0
        content: list[dict[str, Any]] = self.logprob_format.chat(steps, end_ids, top)["content"]
        return content

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        status = status or ("completed" if block.is_complete else "incomplete")
        is_started = status == "in_progress"
        if block.is_thought:
            return {
                "id": _item_id(block),
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": [] if is_started else [self._part(block)],
                "encrypted_content": None,
            }
        if block.name is None:
            return {
                "id": _item_id(block),
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [] if is_started else [self._part(block)],
            }
        return {
            "id": _item_id(block),
            "type": "function_call",
            "status": status,
            "call_id": f"call_{block.id}",
            "name": block.name,
            "arguments": "" if is_started else block.text,
        }

    def _part(self, block: Block) -> dict[str, Any]:
        if block.is_thought:
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs(block.steps)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    # -- in events ---------------------------------------------------------------------------

    async def write(self, wire: Wire) -> None:
        started = self._response("in_progress")
        created = self._event("response.created", response=started)
        wire.write(created + self._event("response.in_progress", response=started))
        await self.deliver(self._render, wire)
        last = self._render(self.blocks.end(self.generation.finish_reason))
        done = self._finished()
        # There is no event for a cancelled response: in a stream, it is incomplete.
        kind = "incomplete" if self.is_cancelled else done["status"]
        wire.write(last + self._event(f"response.{kind}", response=done))

    def _render(self, changes: Iterable[Change]) -> bytes:
        return b"".join(e for change in changes for e in self._change_events(change))

    def _change_events(self, change: Change) -> list[bytes]:
        block = change.block
        item = {"output_index": block.index, "item_id": _item_id(block)}
        part = {**item, "content_index": 0}
        if isinstance(change, BlockOpened):
            started = self._item(block, "in_progress")
            events = [
                self._event("response.output_item.added", output_index=block.index, item=started)
            ]
            if block.name is None:
                empty = self._part(replace(block, parts=[], steps=[]))  # its text follows
                events.append(self._event("response.content_part.added", **part, part=empty))
            return events
        if isinstance(change, BlockGrown):
            if block.name is not None:
                kind = "response.function_call_arguments.delta"
                return [self._event(kind, **item, delta=change.text)]
            if block.is_thought:
                return [self._event("response.reasoning_text.delta", **part, delta=change.text)]
            logprobs = self._logprobs(change.steps)
            kind = "response.output_text.delta"
            return [self._event(kind, **part, delta=change.text, logprobs=logprobs)]
        if block.is_thought:
            events = [
                self._event("response.reasoning_text.done", **part, text=block.text),
                self._event("response.content_part.done", **part, part=self._part(block)),
            ]
        elif block.name is None:
            complete = self._part(block)
            text = {"text": complete["text"], "logprobs": complete["logprobs"]}
            events = [
                self._event("response.output_text.done", **part, **text),
                self._event("response.content_part.done", **part, part=complete),
            ]
        else:
            kind = "response.function_call_arguments.done"
            events = [self._event(kind, **item, name=block.name, arguments=block.text)]
        ends = {"output_index": block.index, "item": self._item(block)}
        return [*events, self._event("response.output_item.done", **ends)]

    def failed(self, error: ApiError) -> bytes:
        """The last event of a response that failed."""
        if not self.number:
            code = error.code or error.type
            return self._event("error", code=code, message=error.message, param=error.param)
        response = self._response("failed")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self.number = self.number, self.number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _replay_events(response: dict[str, Any]) -> list[bytes]:
    """The events of a finished response, each text in one piece."""
    events: list[bytes] = []

    def tell(kind: str, **fields: Any) -> None:
        events.append(event({"type": kind, "sequence_number": len(events), **fields}, kind))

    started = {**response, "status": "in_progress", "output": [], "usage": None,
               "incomplete_details": None, "completed_at": None}  # fmt: skip
    tell("response.created", response=started)
    tell("response.in_progress", response=started)
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = (
            {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        )
        added = {**item, "status": "in_progress", **empty}
        tell("response.output_item.added", output_index=index, item=added)
        if item["type"] == "function_call":
            kind, text = "response.function_call_arguments", item["arguments"]
            tell(f"{kind}.delta", **place, delta=text)
            tell(f"{kind}.done", **place, name=item["name"], arguments=text)
        for number, part in enumerate(item.get("content", ())):
            where = {**place, "content_index": number}
            is_text = part["type"] == "output_text"
            logprobs = {"logprobs": part["logprobs"]} if is_text else {}
            blank: dict[str, Any] = {"logprobs": []} if is_text else {}
            tell("response.content_part.added", **where, part={**part, "text": "", **blank})
            tell(f"response.{part['type']}.delta", **where, delta=part["text"], **logprobs)
            tell(f"response.{part['type']}.done", **where, text=part["text"], **logprobs)
            tell("response.content_part.done", **where, part=part)
        tell("response.output_item.done", output_index=index, item=item)
    status = "completed" if response["status"] == "completed" else "incomplete"
    tell(f"response.{status}", response=response)
    return events


def _item_id(block: Block) -> str:
    return f"{'rs' if block.is_thought else 'msg' if block.name is None else 'fc'}_{block.id}"


def _echoed(value: Any) -> Any:
    """A field of the request as JSON."""
    if value is None or isinstance(value, str):
        return value
    return value.model_dump(by_alias=True, exclude_none=isinstance(value, AllowedToolsChoice))
