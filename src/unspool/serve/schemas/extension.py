"""What Unspool has beyond OpenAI's API, in every request under one key: `unspool`.

{"model": ..., "messages": [...], "unspool": {"min_p": 0.1, "guard": ["loop"], "trace": true}}
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from unspool.sampling.settings import STAGE_SETTINGS, SamplingSettings
from unspool.serve.faults import refused
from unspool.serve.schemas.common import MOST_STOPS, Strict

Number = float | None
Whole = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None
MOST_CANDIDATES = 100
LONGEST_GUARD = 2_000  # characters
Breaker = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=32)]
GuardText = Annotated[str, Field(max_length=LONGEST_GUARD)]


class Sampling(Strict):
    """Sampling settings; those left out have Unspool's usual values."""

    temperature: Number = None
    top_k: Whole = None
    top_p: Number = None
    min_p: Number = None
    typical_p: Number = None
    eta: Number = None
    top_n_sigma: Number = None
    xtc_probability: Number = None
    xtc_threshold: Number = None
    repetition_penalty: Number = None
    frequency_penalty: Number = None
    presence_penalty: Number = None
    penalty_window: Whole = None
    penalize_prompt: bool | None = None
    no_repeat_ngram: Whole = None
    dry_multiplier: Number = None
    dry_base: Number = None
    dry_allowed_length: Whole = None
    dry_window: Whole = None
    dry_breakers: list[Breaker] | None = Field(None, max_length=64)
    dynatemp_range: Number = None
    dynatemp_exponent: Number = None
    mirostat_tau: Number = None
    mirostat_eta: Number = None
    stages: list[str] | None = Field(
        None, max_length=len(STAGE_SETTINGS), description="the stages in your own order"
    )


SAMPLING_NAMES = frozenset(Sampling.model_fields)
assert {*SamplingSettings.__dataclass_fields__} == SAMPLING_NAMES | {"seed", "logit_bias"}


class Extension(Sampling):
    """Sampling stages and their order, guards, grammars, and how much of each step to tell."""

    guard: GuardText | list[GuardText] | None = Field(
        None, description="loop, ban=WORD|WORD, pattern=REGEX, surprise=NATS; each also :stop"
    )
    regex: str | None = Field(None, description="the text must match this")
    grammar: str | None = Field(None, description="a Lark or GBNF grammar")
    choice: list[str] | None = Field(None, description="the text must be one of these")
    json_schema: dict[str, Any] | None = Field(None, description="the text must be such JSON")
    speculate: Literal["lookup"] | None = Field(
        None, description="guess ahead from what stands in the text already"
    )
    trace: bool = Field(False, description="tell every step: candidates, stages, draw")
    top: int = Field(5, ge=0, le=MOST_CANDIDATES, description="candidates that a trace tells")
    cache: bool = Field(
        True, description="false: the whole text is read again for every token, to see the cost"
    )
    end: bool = Field(True, description="false: go on where the model would end")
    sample: int = Field(0, ge=0, lt=1 << 31, description="which of the seed's many texts")
    priority: int = Field(0, ge=-100, le=100)

    def options(self) -> dict[str, Any]:
        """Those that were given, as `LanguageModel.stream` takes them."""
        found = self.model_dump(exclude_none=True, exclude={"trace", "top"}, exclude_defaults=True)
        if isinstance(self.guard, list) and not 0 < len(self.guard) <= MOST_STOPS:
            raise refused(f"unspool.guard may name 1 to {MOST_STOPS} guards", "unspool.guard")
        if "stages" in found:
            found["stages"] = tuple(found["stages"])
        if self.trace:
            found.update(explain=True, top=self.top)
        return found
