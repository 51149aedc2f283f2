"""From a conversation to token ids and options, and how its tool calls are parsed.

Every API with conversations is translated to a `ChatRequest` first, and then prepared here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from unspool.engine.reasoning import CALL, ReasoningSpec
from unspool.sampling import GrammarSpec
from unspool.server.http.errors import bad_request
from unspool.server.http.replies import ignore
from unspool.server.runtime.registry import ServedModel
from unspool.server.runtime.schema import (
    Prediction,
    Reasons,
    SamplingRequest,
    ShortText,
    Strict,
    ToolName,
    Values,
    check_one_grammar,
    check_stream_options,
    compile_schema,
    join_parts,
    prediction_drafter,
    sampling_options,
)
from unspool.server.runtime.state import Call
from unspool.text.chat.template import ChatPrompt
from unspool.text.reasoning import OutputParser, OutputStart, make_output_parser
from unspool.text.tools.formats import ToolSpec
from unspool.text.tools.parser import ToolCallParser

# -- The request schema of `/v1/chat/completions`

MAX_TOP_LOGPROBS = 20


class FunctionCall(Strict):
    name: str
    arguments: str = Field(description="JSON text")


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # some clients send streamed calls back


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionSpec(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTool(Strict):
    """A tool by name, as in chats (`function.name`) or responses (`name`)."""

    type: Literal["function"]
    function: FunctionName | None = None
    name: str | None = None

    @property
    def tool_name(self) -> str:
        name = self.name if self.function is None else self.function.name
        if name is None:
            raise bad_request("a tool of tool_choice has no name", "tool_choice")
        return name


class AllowedTools(Strict):
    """A subset of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=128)


class AllowedToolsChoice(Strict):
    """`allowed_tools`, nested as in chats, or flat as in responses."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = Field(None, min_length=1, max_length=128)

    @property
    def choice(self) -> AllowedTools:
        if self.allowed_tools is not None:
            return self.allowed_tools
        if self.mode is None or self.tools is None:
            raise bad_request(
                "tool_choice of type allowed_tools needs mode and tools", "tool_choice"
            )
        return AllowedTools(mode=self.mode, tools=self.tools)


class JsonSchema(Strict):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="of a json_object")


class Reasoning(Strict):
    """Whether and how much to reason."""

    effort: ShortText | None = None
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    enabled: bool | None = None
    exclude: bool | None = Field(None, description="true: do not send the reasoning")


class ChatRequest(SamplingRequest):
    """A conversation to answer."""

    unsupported_fields: ClassVar[Reasons] = {
        "audio": "only text is supported",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "web_search_options": "this server does not access the network",
    }
    noop_values: ClassVar[Values] = {"function_call": ["none", "auto"]}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_tokens: int | None = Field(
        None, ge=0, lt=1 << 31, description="0: compute the prompt for later requests, no answer"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: ShortText | None = Field(
        None, description="none, low, medium, high: whether and how much to reason first"
    )
    reasoning: Reasoning | None = None
    thinking_budget: int | None = Field(
        None, ge=0, lt=1 << 31, description="most tokens of reasoning"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="for the model's chat template, such as enable_thinking"
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, whether one of them must be called, and the reasoning format."""

    tools: tuple[ToolSpec, ...] = ()
    choice: str = "auto"  # none, auto, required, or "=" and a tool's name
    allowed: tuple[str, ...] | None = None  # names of the tools that may be called; None: all
    parallel: bool | None = None  # whether there may be several calls; None: not specified
    thinking: ReasoningSpec | None = None  # set once there is a prompt; None: no reasoning

    @property
    def offered(self) -> tuple[ToolSpec, ...]:
        """The tools in the prompt: those that the model may call."""
        if self.choice == "none":
            return ()
        return tuple(t for t in self.tools if self.allowed is None or t.name in self.allowed)

    @property
    def required(self) -> tuple[ToolSpec, ...]:
        """The tools of which one must be called; empty: no call is needed."""
        if self.choice == "required":
            return self.offered
        return tuple(tool for tool in self.tools if self.choice == f"={tool.name}")

    def check(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise bad_request("two tools have the same name", "tools")
        if not self.tools and self.choice not in ("auto", "none"):
            raise bad_request("tool_choice requires a tool, but tools is empty", "tool_choice")
        required = [self.choice[1:]] if self.choice.startswith("=") else self.allowed or ()
        for name in required:
            if name not in names:
                message = f"tool_choice must name one of the tools, got {name[:80]!r}"
                raise bad_request(message, "tool_choice")

    @property
    def is_plain(self) -> bool:
        """Whether an answer is text only."""
        return not self.offered and self.thinking is None

    def reader(self, served: ServedModel, start: OutputStart | None = None) -> OutputParser | None:
        """A parser of reasoning and tool calls; None if the answer is text only."""
        calls, thinking = self._call_reader(served), self.thinking
        if thinking is None:
            return calls
        return make_output_parser(thinking.format, start or thinking.start, calls)

    def _call_reader(self, served: ServedModel) -> ToolCallParser | None:
        if not self.offered:
            return None
        # Where a call is bare JSON, an answer in JSON must not be parsed as a call.
        names = {tool.name for tool in self.offered} if served.tools.name == "llama3" else None
        required = bool(self.required)
        return ToolCallParser(served.tools, required=required, names=names, tools=self.offered)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation as token ids, options and tool use."""

    ids: list[int]
    options: dict[str, Any]  # of `LanguageModel.stream`
    use: ToolUse


def check_chat(body: ChatRequest) -> None:
    """Reject parameters that contradict each other."""
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    check_stream_options(body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        message = "max_tokens and max_completion_tokens are the same parameter; give one"
        raise bad_request(message, "max_tokens")


def prepare_chat(call: Call, body: ChatRequest, **extra: Any) -> PreparedChat:
    """Render and tokenize a conversation, and check its options. Slow: run it on a thread.

    Args:
        extra: Options that `ChatRequest` has no field for.
    """
    call.apply_hints(body)
    options = sampling_options(call.served.lm, body, top=body.top_logprobs or 0, **extra)
    use = tool_use(body)
    schema = _answer_schema(options, body)
    if streams_trace(body) and use.offered and "guard" in options:
        raise bad_request(
            "a guard may rewind the text, but a streamed tool call cannot be retracted; omit "
            "stream, tools, unspool.trace or unspool.guard",
            "unspool.guard",
        )
    if body.prediction is not None:
        if options.get("speculate"):
            message = "prediction and unspool.speculate are both drafts; give one"
            raise bad_request(message, "prediction")
        options["speculate"] = prediction_drafter(call.served.lm, body.prediction.text)
    messages = [template_message(message) for message in body.messages]
    if len(messages) > call.served.lm.context:
        raise bad_request(
            f"{len(messages):,} messages do not fit in the model's context",
            code="context_length_exceeded",
        )
    if messages[-1].get("tool_calls"):
        first = messages[-1]["tool_calls"][0]
        raise bad_request(f"the tool call {first['id'][:80]!r} has no result message after it")
    tools = [json.dumps(tool.as_openai()) for tool in use.offered]
    words = [*tools, *(message.get("content") or "" for message in messages)]
    call.check_text(*words, longer=body.is_endless)
    template = template_options(body)
    if body.thinking_budget is not None:
        options["think_budget"] = body.thinking_budget
    think = _think(call, body, options)
    _set_format(call, options, use, schema)
    ids = chat_prompt(
        call.served, messages, use, options, template, note=call.note, think=think
    ).ids
    compile_schema(options, call.note)
    max_tokens = body.max_completion_tokens or body.max_tokens
    options["max_tokens"] = call.token_limit(max_tokens, len(ids))
    return PreparedChat(ids, options, replace(use, thinking=call.served.lm.thinking(ids)))


def _think(call: Call, body: ChatRequest, options: dict[str, Any]) -> bool | str | None:
    """Whether and how much the model should reason; ignored for models without reasoning."""
    effort: bool | str | None = body.reasoning_effort
    if body.reasoning is not None:
        effort = effort or body.reasoning.effort or body.reasoning.enabled
        if body.reasoning.max_tokens is not None:
            options["think_budget"] = body.reasoning.max_tokens
    if call.served.lm.thought_format is not None:
        return effort
    params = {"reasoning_effort": body.reasoning_effort, "reasoning": body.reasoning}
    for name in (name for name, value in params.items() if value is not None):
        ignore(call.request, name)
    if options.pop("think_budget", None) is not None:
        ignore(call.request, "thinking_budget")
    return None


def chat_prompt(
    served: ServedModel,
    messages: Sequence[dict[str, Any]],
    use: ToolUse,
    options: dict[str, Any],
    template: Mapping[str, Any] | None = None,
    note: Callable[..., None] = lambda *_: None,
    think: bool | str | None = None,
) -> ChatPrompt:
    """Render and tokenize a conversation. Adds stop strings and a required grammar to `options`.

    Args:
        template: Variables of the chat template.
        note: Receives notes for the client.
        think: Whether, or how much, to reason; for the chat template.
    """
    use.check()
    lm = served.lm
    ready, tools = served.tools.prepare_messages(list(messages), use.offered)
    variables = {**lm.think_options(think, options), **(template or {})}
    prompt = lm.chat_prompt(ready, tools=tools, **variables)
    options["stop"] = (*options.get("stop", ()), *lm.chat_template.stops)
    if use.required:
        check_one_grammar(options, "a required tool call")
        # Small models rarely stop calling: several calls only if requested.
        several = use.parallel is True and use.choice == "required"
        required = [_normalized(tool, note) for tool in use.required]
        options["grammar"] = GrammarSpec.lark(served.tools.grammar(required, parallel=several))
        if options.get("thoughts") and served.tools.syntax == "channels":
            options["thoughts"] = CALL
    return prompt


def _normalized(tool: ToolSpec, note: Callable[..., None]) -> ToolSpec:
    """A tool whose schema is normalized as all JSON schemas are."""
    spec = GrammarSpec.json_schema(tool.parameters)
    note(*spec.notes)
    return replace(tool, parameters=json.loads(spec.source))


_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def template_options(body: Any) -> dict[str, Any]:
    """Variables for the model's chat template."""
    variables = dict(body.chat_template_kwargs or {})
    for name in _RESERVED:
        if name in variables:
            message = f"chat_template_kwargs may not have {name}, which is a separate parameter"
            raise bad_request(message, "chat_template_kwargs")
    for name in _RESERVED[2:]:
        if getattr(body, name, None) is not None:
            variables[name] = getattr(body, name)
    return variables


def streams_trace(body: ChatRequest) -> bool:
    """Whether steps are sent immediately, also those that a guard may retract."""
    return bool(body.stream) and body.unspool is not None and body.unspool.trace


def template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates take it."""
    fields = message.model_dump(exclude_none=True)
    if fields["role"] == "developer":
        fields["role"] = "system"
    if isinstance(fields.get("content"), list):
        fields["content"] = join_parts(fields["content"], "content")
    if fields.get("content") is None and not fields.get("tool_calls"):
        raise bad_request(f"a message of the {fields['role']} has no content", "messages")
    for call in fields.get("tool_calls") or []:
        call.pop("index", None)
    return fields


def tool_call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as OpenAI's API has it."""
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def tools_of(tools: Sequence[FunctionTool] | None) -> tuple[ToolSpec, ...]:
    functions = [tool.function for tool in tools or ()]
    return tuple(ToolSpec(f.name, f.description or "", f.parameters or {}) for f in functions)


def tool_use(body: ChatRequest) -> ToolUse:
    choice, tools = body.tool_choice, tools_of(body.tools)
    if isinstance(choice, AllowedToolsChoice):
        names = tuple(tool.tool_name for tool in choice.choice.tools)
        return ToolUse(tools, choice.choice.mode, names, body.parallel_tool_calls)
    mode = f"={choice.function.name}" if isinstance(choice, NamedTool) else choice or "auto"
    return ToolUse(tools, mode, parallel=body.parallel_tool_calls)


def _answer_schema(options: dict[str, Any], body: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema of `response_format`; None: any text."""
    response_format = body.response_format
    if response_format is None or response_format.type == "text":
        return None
    check_one_grammar(options, "response_format")
    if response_format.type == "json_object":
        return response_format.schema_ or {}
    if response_format.json_schema is None:
        message = "response_format of type json_schema needs a schema"
        raise bad_request(message, "response_format")
    return response_format.json_schema.schema_ or {"type": "object"}


def _set_format(
    call: Call, options: dict[str, Any], use: ToolUse, schema: dict[str, Any] | None
) -> None:
    """Add the schema of the answer to the options.

    It constrains text. An answer that must be a tool call is not text, and where a call is
    possible, the grammar allows either a call or text of this schema.
    """
    if schema is None or use.required:
        return
    if not use.offered or call.served.tools.syntax == "channels":
        options |= {"json_schema": schema} if schema else {"json": True}
        return
    spec = GrammarSpec.json_schema(schema) if schema else None
    call.note(*(() if spec is None else spec.notes))
    answer = '{"type": "object"}' if spec is None else spec.source
    tools = [_normalized(tool, call.note) for tool in use.offered]
    calls = call.served.tools.grammar(tools, parallel=use.parallel is True)
    words = f"start: calls | words\nwords: %json {answer}\ncalls:"
    options["grammar"] = GrammarSpec.lark(calls.replace("start:", words, 1))
