"""Request schemas of Ollama's endpoints."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool

from unspool.serve.core.schema import (
    ForeignRequest,
    PartialApi,
    Reasons,
    ShortText,
    Strict,
    Tokens,
    ToolName,
)
from unspool.serve.openai.chat_schema import MAX_TOP_LOGPROBS, FunctionTool
from unspool.text.chat.messages import ONLY_TEXT

Format = Literal["", "json"] | dict[str, Any]


class CalledFunction(Strict):
    name: ToolName
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class OllamaToolCall(Strict):
    function: CalledFunction
    id: ShortText | None = None
    type: Literal["function"] = "function"


class OllamaMessage(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {"images": ONLY_TEXT}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: ShortText | None = None
    tool_call_id: ShortText | None = None


class _OllamaRequest(ForeignRequest):
    """Parameters that `/api/generate` and `/api/chat` share."""

    model: ShortText | None = None
    stream: bool | None = Field(None, description="false: the complete answer in one response")
    format: Format | None = Field(None, description="json, or a JSON schema")
    options: dict[str, Any] | None = Field(None, description="temperature, num_predict, seed, …")
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncate: bool | None = None  # has no effect: long prompts are rejected, or shifted
    shift: bool | None = Field(
        None, description="true: continue beyond the context, dropping the oldest tokens"
    )


class OllamaChatRequest(_OllamaRequest):
    """A conversation to answer; without messages, a model to load."""

    messages: list[OllamaMessage] | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)


class GenerateRequest(_OllamaRequest):
    """A prompt to answer; without one, a model to load."""

    unsupported_fields: ClassVar[Reasons] = {
        "images": ONLY_TEXT,
        "template": "Go templates are not supported; send the complete prompt with raw: true",
    }
    noop_values: ClassVar[dict[str, list[Any]]] = {"template": [""]}

    prompt: str | None = None
    suffix: str | None = Field(None, description="text after the answer (infill)")
    system: str | None = None
    context: Tokens | None = Field(None, description="`context` of an earlier answer")
    raw: bool | None = Field(None, description="use the prompt without the chat template")
    parse_special: StrictBool = Field(
        True, description="of a raw prompt: parse control tokens; false: they are text"
    )


class EmbedRequest(ForeignRequest):
    """Texts to embed."""

    model: ShortText | None = None
    input: str | Annotated[list[str], Field(min_length=1, max_length=256)]
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1)
    options: dict[str, Any] | None = None


class EmbeddingsRequest(ForeignRequest):
    """One text, for Ollama's older endpoint."""

    model: ShortText | None = None
    prompt: str
    options: dict[str, Any] | None = None


class ShowRequest(Strict):
    """The model to describe."""

    model: ShortText | None = None
    name: ShortText | None = Field(None, description="an older name of `model`")
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None
