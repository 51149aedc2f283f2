"""What `/v1/tree` takes.

Settings stand beside the rest here, not under a key of their own: nothing of this API is OpenAI's.
"""

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
DEFAULT_TOKENS = 256  # that one resume writes at most


class WriteOptions(Extension):
    """How a branch is to be written. Every step is told in full unless `trace` is false."""

    seed: Seed | None = Field(None, description="null: a new one by chance")
    stop: StopStrings | None = None
    logit_bias: Bias | None = None
    max_tokens: int | None = Field(
        None,
        ge=1,
        lt=1 << 31,
        description=f"how many more tokens a resume writes at most ({DEFAULT_TOKENS})",
    )
    think_budget: int | None = Field(
        None, ge=0, lt=1 << 31, description="close a thought after so many tokens"
    )
    trace: bool = Field(True, description="each step tells what every sampling stage did")

    @property
    def given(self) -> set[str]:
        """The settings that this request names."""
        return self.model_fields_set & (WriteOptions.model_fields.keys() - {"max_tokens"})

    def settings(self) -> dict[str, Any]:
        """What was given, as `LanguageModel.stream` takes it; null means the usual value."""
        return {_NAMES.get(name, name): self._setting(name) for name in sorted(self.given)}

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


_NAMES = {"trace": "explain"}  # what it is called below


class CreateRequest(WriteOptions):
    """A prompt to begin with: text, token ids, or a conversation."""

    model: str | None = None
    name: Name | None = None
    prompt: str | Tokens | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


class BranchUpdate(Strict):
    """A new name, or a new pace for the writing that goes on now."""

    name: Name | None = None
    pace: Pace | None = Field(None, description="tokens a second at most; null: as fast as may be")


class AppendRequest(Strict):
    """Words of a person's own, to stand at the end: as they are, or as a turn of a conversation."""

    text: Words | None = None
    tokens: Tokens | None = None
    message: Message | None = Field(
        None, description="put in as the chat template does, up to where the model's turn begins"
    )


class ForkRequest(Strict):
    """Where a new branch leaves this one."""

    at: Place | None = Field(None, description="steps it begins with; negative: from behind")
    name: Name | None = None


class RewindRequest(Strict):
    """How many steps stay."""

    to: Place = Field(description="negative: so many are taken back")


class ChooseRequest(Strict):
    """Another token, or other words, for one place; what stood behind it is let go."""

    at: Place | None = Field(None, description="the step to replace; by default, behind the last")
    token: int | None = Field(None, ge=0, lt=1 << 31)
    text: Words | None = None
    fork: bool = Field(True, description="into a new branch, so that nothing is lost")
    name: Name | None = None


class ResumeRequest(WriteOptions):
    """How to go on; settings named here hold from now on."""

    n: int = Field(1, ge=1, lt=1 << 31, description="1: in place; more: so many new branches")
    stream: bool = False
    pace: Pace | None = Field(None, description="tokens a second at most")
