"""What `/v1/completions` takes."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from unspool.serve.core.schema import (
    Bias,
    Extension,
    PartialApi,
    Prompts,
    Reasons,
    Seed,
    ShortText,
    StopStrings,
    StreamOptions,
)


class CompletionRequest(PartialApi):
    """Texts to be continued."""

    unsupported_fields: ClassVar[Reasons] = {
        "suffix": "the models here write from the left to the right"
    }

    model: str | None = None
    prompt: Prompts
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = None
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Bias | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    stop: StopStrings | None = None
    seed: Seed | None = None
    user: ShortText | None = None
    unspool: Extension | None = None
