"""Request schemas of `/v1/tree`. All settings are top-level parameters."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from unspool.serve.core.schema import (
    MAX_STOPS,
    Bias,
    Extension,
    Seed,
    StopStrings,
    Strict,
    Tokens,
    biases,
    stops,
)
from unspool.serve.http.errors import bad_request
from unspool.serve.openai.chat_schema import Message

Name = Annotated[str, StringConstraints(max_length=200)]
Words = Annotated[str, StringConstraints(min_length=1)]
Place = Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]
Pace = Annotated[float, Field(gt=0, le=1e6)]

GRAMMARS = ("regex", "grammar", "choice", "json_schema")
DEFAULT_TOKENS = 256  # most tokens of one resume


class WriteOptions(Extension):
    """Settings of a branch. Every step is traced unless `trace` is false."""

    seed: Seed | None = Field(None, description="null: a new random one")
    stop: StopStrings | None = None
    logit_bias: Bias | None = None
    max_tokens: int | None = Field(
        None,
        ge=1,
        lt=1 << 31,
        description=f"most tokens of one resume ({DEFAULT_TOKENS})",
    )
    think_budget: int | None = Field(
        None, ge=0, lt=1 << 31, description="end the reasoning after this many tokens"
    )
    trace: bool = Field(True, description="each step has the record of every sampling stage")

    @property
    def setting_names(self) -> set[str]:
        """The settings that this request names."""
        return self.model_fields_set & (WriteOptions.model_fields.keys() - {"max_tokens"})

    def settings(self) -> dict[str, Any]:
        """Options of `LanguageModel.stream` that the request sets; null means the default."""
        return {_NAMES.get(name, name): self._setting(name) for name in sorted(self.setting_names)}

    def _setting(self, name: str) -> Any:
        value = getattr(self, name)
        if name == "seed":
            return secrets.randbits(32) if value is None else value
        if name == "stop":
            return stops(value)
        if name == "logit_bias":
            return biases(value)
        if name == "guard" and isinstance(value, list) and not 0 < len(value) <= MAX_STOPS:
            raise bad_request(f"guard may name 1 to {MAX_STOPS} guards", "guard")
        return tuple(value) if name == "stages" and value is not None else value


_NAMES = {"trace": "explain"}  # the name in `LanguageModel.stream`


class CreateRequest(WriteOptions):
    """A prompt: text, token ids, or a conversation."""

    model: str | None = None
    name: Name | None = None
    prompt: str | Tokens | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


class BranchUpdate(Strict):
    """A new name, or a new pace for the running resume."""

    name: Name | None = None
    pace: Pace | None = Field(None, description="most tokens a second; null: no limit")


class AppendRequest(Strict):
    """Text or tokens to append, or the next message of a conversation."""

    text: Words | None = None
    tokens: Tokens | None = None
    message: Message | None = Field(
        None, description="rendered by the chat template, up to the start of the model's turn"
    )


class ForkRequest(Strict):
    """Where to fork a branch."""

    at: Place | None = Field(None, description="steps to share; negative: from the end")
    name: Name | None = None


class RewindRequest(Strict):
    """How many steps to keep."""

    to: Place = Field(description="negative: from the end")


class ChooseRequest(Strict):
    """Another token or text at a step; the steps after it are removed."""

    at: Place | None = Field(None, description="the step to replace; by default, after the last")
    token: int | None = Field(None, ge=0, lt=1 << 31)
    text: Words | None = None
    fork: bool = Field(True, description="into a new branch; the old one stays")
    name: Name | None = None


class ResumeRequest(WriteOptions):
    """How to resume; these settings become those of the branch."""

    n: int = Field(1, ge=1, lt=1 << 31, description="1: in place; more: this many new branches")
    stream: bool = False
    pace: Pace | None = Field(None, description="most tokens a second")
