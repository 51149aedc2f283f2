"""The dials of a twin's training, and what the trainer is given for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unspool.errors import SettingsError
from unspool.train.data.sources import DEFAULT_SOURCE
from unspool.train.learning.optimizers import Kind, Rates
from unspool.train.running.ahead import Batches
from unspool.train.running.checkpoints import SaveModel
from unspool.train.running.loop import Judge, Sampler
from unspool.train.twins.puzzles.puzzle import PUZZLES

KINDS = ("block", "fill", "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinSettings:
    """All dials; run.json keeps them."""

    kind: str = "block"  # or fill, draft, or a puzzle: sudoku, sudoku:48, countdown
    model: str | None = None
    start: str | None = None  # fill, draft: a twin to go on from
    data: tuple[str, ...] = (DEFAULT_SOURCE,)
    shares: tuple[float, ...] = ()  # of each source; empty: alike
    chat: int = 16000  # texts that the model writes itself
    chat_share: float = 0.6
    chat_tokens: int = 256
    questions: str | None = None  # a file with one in each line
    writing_minutes: float | None = None  # for the texts; what is there then must do
    mask: int | None = None  # the token that is the mask
    block: int = 8  # that is usual for the twin
    lora: int = 0  # rank; 0: all weights
    alpha: float | None = None
    sight: str = "whole"  # of a puzzle's twin; or causal
    depth: int = 6  # layers of a puzzle's twin
    width: int = 224
    heads: int = 7
    steps: int | None = None
    minutes: float | None = None
    budget_s: float | None = None  # seconds of training, from `minutes`
    batch: int | None = None  # rows
    length: int | None = None  # tokens of a row
    accumulate: int = 1
    rate: float | None = None
    optimizer: str | None = None
    weight_decay: float = 0.01
    warmup: float = 0.02
    decay: float = 0.5
    draft_steps: int = 6
    draft_tokens: int = 12288
    seed: int = 0
    save_every: int | None = None
    judge_every: int | None = None
    device: str = "auto"
    bf16: bool | None = None
    compile: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS and self.puzzle not in PUZZLES:
            raise SettingsError(
                f"there is no kind {self.kind!r} of twin; there are {', '.join((*KINDS, *PUZZLES))}"
            )
        if self.lora and self.kind not in ("block", "fill"):
            raise SettingsError("only block and fill twins can be adapters; leave --lora out")
        if self.start and self.kind not in ("fill", "draft"):
            raise SettingsError("only fill and draft begin as another twin; leave --from out")
        if self.sight not in ("causal", "whole"):
            raise SettingsError(f"a puzzle's twin sees causal or whole, not {self.sight!r}")
        if self.steps is not None and self.minutes is not None:
            raise SettingsError("give steps or minutes, not both")
        if self.shares and len(self.shares) != len(self.data):
            raise SettingsError(
                f"{len(self.data)} sources have {len(self.shares)} shares; give one for each"
            )

    @property
    def puzzle(self) -> str:
        return self.kind.partition(":")[0]

    @property
    def is_puzzle(self) -> bool:
        return self.kind not in KINDS


@dataclass(frozen=True, slots=True)
class Parts:
    """What the trainer needs of one kind of twin."""

    model: Any
    batches: Batches
    objective: Any
    save: SaveModel
    judge: Judge | None
    sampler: Sampler | None
    rates: Rates
    optimizer: Kind
    facts: dict[str, Any]  # for run.json
