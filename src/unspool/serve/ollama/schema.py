"""What Ollama's endpoints take."""

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


class ToolCall(Strict):
    function: CalledFunction
    id: ShortText | None = None
    type: Literal["function"] = "function"


class Message(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {"images": ONLY_TEXT}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: ShortText | None = None
    tool_call_id: ShortText | None = None


class _Asking(ForeignRequest):
    """What `/api/generate` and `/api/chat` have in common."""

    model: ShortText | None = None
    stream: bool | None = Field(None, description="false: the whole answer at once")
    format: Format | None = Field(None, description="json, or a JSON schema")
    options: dict[str, Any] | None = Field(None, description="temperature, num_predict, seed, …")
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncate: bool | None = None  # here a prompt that is too long is refused, or shifted
    shift: bool | None = Field(
        None, description="true: go on beyond the context, forgetting the oldest tokens"
    )


class ChatRequest(_Asking):
    """A conversation to be answered; without messages, a model to be loaded."""

    messages: list[Message] | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)


class GenerateRequest(_Asking):
    """A prompt to be answered; without one, a model to be loaded."""

    unsupported_fields: ClassVar[Reasons] = {
        "images": ONLY_TEXT,
        "template": "it would be a Go template; send the whole prompt with raw: true",
    }
    noop_values: ClassVar[dict[str, list[Any]]] = {"template": [""]}

    prompt: str | None = None
    suffix: str | None = Field(None, description="what stands behind the text to be written")
    system: str | None = None
    context: Tokens | None = Field(None, description="what an earlier answer gave back")
    raw: bool | None = Field(None, description="the prompt as it is, without the chat template")
    parse_special: StrictBool = Field(
        True, description="of a raw prompt: control tokens that it spells are control; false: text"
    )


class EmbedRequest(ForeignRequest):
    """Texts to embed."""

    model: ShortText | None = None
    input: str | Annotated[list[str], Field(min_length=1, max_length=256)]
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1)
    options: dict[str, Any] | None = None


class EmbeddingsRequest(ForeignRequest):
    """One text, as Ollama's older endpoint takes it."""

    model: ShortText | None = None
    prompt: str
    options: dict[str, Any] | None = None


class ShowRequest(Strict):
    """Which model is to be told of."""

    model: ShortText | None = None
    name: ShortText | None = Field(None, description="an older word for model")
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None
