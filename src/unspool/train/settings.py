"""Settings of training a new model, stored in run.json."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from unspool.errors import SettingsError
from unspool.train.data.sources import DEFAULT_SOURCE
from unspool.train.learning.mitigations import MitigatedNextToken
from unspool.train.learning.shape import RECURRENT_SHAPES, SHAPES
from unspool.train.running.runs import Run

OBJECTIVES = ("next_token", "masked", "block_diffusion")
OPTIMIZERS = ("muon", "adamw")

_POSITIVE = (
    "limit", "vocab_size", "depth", "width", "heads", "kv_heads", "head_width", "ff_width",
    "block", "length", "batch", "batch_tokens", "steps", "tokens", "minutes", "log_every",
    "judge_every", "sample_every", "save_every",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSettings:
    """All settings. A setting that is None follows from the others by the rules in `shape.py`."""

    data: tuple[str, ...] = (DEFAULT_SOURCE,)
    field: str | None = None
    limit: int | None = None
    held_out: float | str = 0.01
    tokenizer: str | None = None  # a folder; None: train one
    vocab_size: int | None = None
    depth: int | None = None
    shape: str = "qwen3"  # layer type: one of SHAPES
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_width: int | None = None
    ff_width: int | None = None
    tied: bool | None = None
    like: str | None = None  # a model whose config to use
    start: str | None = None  # a model whose weights to start from
    objective: str = "next_token"
    block: int = 8  # block size of block diffusion
    scheduled_sampling: float = 0.0  # share of inputs sampled from the model, at the end
    unlikelihood: float = 0.0  # weight of the repetition penalty; 0: off
    optimizer: str = "muon"
    rate: float = 1.0  # factor on the default learning rates
    weight_decay: float = 0.1
    length: int | None = None  # tokens per row
    batch: int | None = None  # rows per forward pass and process
    batch_tokens: int | None = None  # per step, over all processes
    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    warmup: float = 0.02  # share of the steps
    decay: float = 0.5
    clip: float = 1.0
    inside_documents: bool = False
    seed: int = 0
    device: str = "auto"
    bf16: bool | None = None
    compile: bool | None = None
    recompute: bool = False
    log_every: int = 1
    judge_every: int | None = None
    sample_every: int | None = None
    save_every: int | None = None
    keep: int = 2
    patience: int = 3  # evaluations in a row without a new best that end the run; 0: never
    prompts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingsError(f"{name} must be more than 0, got {value}")
        if self.objective not in OBJECTIVES:
            raise _unknown("objective", self.objective, OBJECTIVES)
        if self.optimizer not in OPTIMIZERS:
            raise _unknown("optimizer", self.optimizer, OPTIMIZERS)
        MitigatedNextToken(self.scheduled_sampling, self.unlikelihood)  # checks both
        if self.is_mitigated and self.objective != "next_token":
            raise SettingsError(
                "scheduled sampling and unlikelihood need the objective next_token, not "
                f"{self.objective}; leave them out"
            )
        if self.shape not in SHAPES:
            raise _unknown("shape", self.shape, SHAPES)
        if self.shape in RECURRENT_SHAPES and self.objective != "next_token":
            raise SettingsError(
                f"the recurrent layers of {self.shape} are causal, but the objective "
                f"{self.objective} is bidirectional; use --shape qwen3 or llama with it"
            )
        if self.shape != "qwen3" and (self.like or self.start):
            raise SettingsError("--like and --from bring their own shape; leave out --shape")
        if self.start and (self.like or self.depth or self.tokenizer):
            raise SettingsError(
                "--from brings its own shape and tokenizer; leave out --like, --depth and "
                "--tokenizer"
            )

    @property
    def is_mitigated(self) -> bool:
        """Whether scheduled sampling or unlikelihood is on."""
        return bool(self.scheduled_sampling or self.unlikelihood)

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of the model config that were set explicitly."""
        names = ("width", "heads", "kv_heads", "head_width", "ff_width", "tied")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _unknown(name: str, value: str, choices: tuple[str, ...]) -> SettingsError:
    return SettingsError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")


def settings_of(run: Run) -> NewSettings:
    """The settings stored in a run."""
    names = {field.name for field in fields(NewSettings)}
    stored = {n: value for n, value in run.facts.get("settings", {}).items() if n in names}
    for name in ("data", "prompts"):
        stored[name] = tuple(stored.get(name, ()))
    return NewSettings(**stored)
