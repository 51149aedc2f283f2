"""Every dial of a training from text; run.json keeps them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from unspool.errors import SettingsError
from unspool.train.data.sources import DEFAULT_SOURCE
from unspool.train.learning.mitigations import MitigatedNextToken
from unspool.train.learning.shape import RECURRENT_SHAPES, SHAPES
from unspool.train.running.runs import Run

OBJECTIVES = ("next_token", "masked", "block_diffusion")


_POSITIVE = (
    "limit", "vocab_size", "depth", "width", "heads", "kv_heads", "head_width", "ff_width",
    "block", "length", "batch", "batch_tokens", "steps", "tokens", "minutes", "log_every",
    "judge_every", "sample_every", "save_every",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSettings:
    """Every dial. What is None follows from the others by the rules in `shape.py`."""

    data: tuple[str, ...] = (DEFAULT_SOURCE,)
    field: str | None = None
    limit: int | None = None
    held_out: float | str = 0.01
    tokenizer: str | None = None  # a folder; else one is made
    vocab_size: int | None = None
    depth: int | None = None
    shape: str = "qwen3"  # what a layer is: one of SHAPES
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_width: int | None = None
    ff_width: int | None = None
    tied: bool | None = None
    like: str | None = None  # a model whose shape to take
    start: str | None = None  # a model whose weights to go on from
    objective: str = "next_token"
    block: int = 8  # of block diffusion
    scheduled_sampling: float = 0.0  # share of the inputs that are the model's own, at the end
    unlikelihood: float = 0.0  # weight of not repeating what occurred; 0: off
    optimizer: str = "muon"
    rate: float = 1.0  # times the learning rates of the rules
    weight_decay: float = 0.1
    length: int | None = None  # tokens in a row
    batch: int | None = None  # rows that go through the model at once, in each process
    batch_tokens: int | None = None  # in a step, over all processes
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
            raise SettingsError(f"there is no objective {self.objective!r}; {_one_of(OBJECTIVES)}")
        if self.optimizer not in ("muon", "adamw"):
            raise SettingsError(f"there is no optimizer {self.optimizer!r}; muon or adamw")
        MitigatedNextToken(self.scheduled_sampling, self.unlikelihood)  # refuses what cannot be
        if self.mitigated and self.objective != "next_token":
            raise SettingsError(
                "scheduled sampling and unlikelihood are remedies of next-token training; leave "
                f"them out with the objective {self.objective}"
            )
        if self.shape not in SHAPES:
            raise SettingsError(f"there is no shape {self.shape!r}; {_one_of(SHAPES)}")
        if self.shape in RECURRENT_SHAPES and self.objective != "next_token":
            raise SettingsError(
                f"layers as in {self.shape} read from left to right, and the objective "
                f"{self.objective} looks both ways; use --shape qwen3 or llama with it"
            )
        if self.shape != "qwen3" and (self.like or self.start):
            raise SettingsError("a model to be like, or to go on from, brings its own shape")
        if self.start and (self.like or self.depth or self.tokenizer):
            raise SettingsError("a model to go on from brings its own shape and vocabulary")

    @property
    def mitigated(self) -> bool:
        """Whether there is more to the loss than the next token."""
        return bool(self.scheduled_sampling or self.unlikelihood)

    @property
    def sizes(self) -> dict[str, Any]:
        """What of the model's config was said."""
        names = ("width", "heads", "kv_heads", "head_width", "ff_width", "tied")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _one_of(names: tuple[str, ...]) -> str:
    return "there are " + ", ".join(names)


def settings_of(run: Run) -> NewSettings:
    """The dials of a run that was begun."""
    told = run.facts.get("settings", {})
    known = {each.name for each in fields(NewSettings)}
    given = {name: value for name, value in told.items() if name in known}
    for name in ("data", "prompts"):
        given[name] = tuple(given.get(name, ()))
    return NewSettings(**given)
