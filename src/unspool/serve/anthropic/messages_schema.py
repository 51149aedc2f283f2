"""The request schema of `/v1/messages`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from unspool.serve.core.schema import (
    ExtensionWithSeed,
    PartialApi,
    Reasons,
    ShortText,
    Strict,
    ToolName,
    Values,
    by_type,
)

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
