"""What the requests of several endpoints have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from unspool.serve.faults import refused, unsupported

LARGEST_SEED = (1 << 63) - 1


class Strict(BaseModel):
    """A request in which an unknown parameter is refused, never ignored."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


ShortText = Annotated[str, StringConstraints(max_length=1000)]
StopStrings = str | list[str]
Bias = dict[str, float]
Seed = Annotated[int, Field(ge=-LARGEST_SEED, le=LARGEST_SEED)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]
MOST_STOPS = 16
MOST_BIASES = 1024
MOST_PROMPTS = 256
Prompts = (
    str
    | Tokens
    | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
)


def listed(given: Prompts) -> list[str | list[int]]:
    """One text or several, each as words or as token ids: always as a list."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return [*given]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # we add none, so there is none to leave out


class Prediction(Strict):
    """A guess of what the answer will be: read as a draft, which makes it come faster."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else joined(self.content, "prediction")


def joined(parts: list[dict[str, Any]], where: str) -> str:
    """Content that comes in parts, as one text."""
    for part in parts:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise unsupported(f"{where} of type {part.get('type')!r:.40}", "only text is read")
        if not isinstance(part.get("text"), str):
            raise refused(f"a part of {where} has no text", where)
    return "".join(part["text"] for part in parts)


def stops(given: StopStrings | None) -> tuple[str, ...]:
    found = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if len(found) > MOST_STOPS:
        raise refused(f"stop has {len(found)} strings; at most {MOST_STOPS} are allowed", "stop")
    if any(len(text) > 1000 for text in found):
        raise refused("a stop string may have at most 1,000 characters", "stop")
    return found


def biases(given: Bias | None) -> dict[int, float]:
    """Token ids come as texts in JSON."""
    found: dict[int, float] = {}
    if given is not None and len(given) > MOST_BIASES:
        raise refused(f"logit_bias may name at most {MOST_BIASES} tokens", "logit_bias")
    for token, amount in (given or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise refused(
                f"logit_bias names token {token[:40]!r}; it may be a token id", "logit_bias"
            )
        if not -100 <= amount <= 100:
            raise refused(
                f"logit_bias of {token} is {amount}; it may be from -100 to 100", "logit_bias"
            )
        # As OpenAI says: 100 means only this one, -100 means never.
        found[int(token)] = {100.0: float("inf"), -100.0: float("-inf")}.get(amount, amount)
    return found
