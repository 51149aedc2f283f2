"""The request schema of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from unspool.serve.core.schema import (
    Prediction,
    Reasons,
    SamplingRequest,
    ShortText,
    Strict,
    ToolName,
    Values,
)
from unspool.serve.http.errors import bad_request

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


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    function: Function


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
