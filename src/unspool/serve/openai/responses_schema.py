"""The request schema of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, Tag

from unspool.serve.core.schema import (
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
)
from unspool.serve.openai.chat_schema import MAX_TOP_LOGPROBS, AllowedToolsChoice
from unspool.text.chat.messages import ONLY_TEXT

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
