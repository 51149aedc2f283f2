"""Every stage by name, and what a stage is.

A stage takes the candidates of all rows and gives those that remain, or the same with other logits.
It changes nothing it is given (but `revise` may write into the copy that another `revise` has just
made: `Candidates.passing`), keeps nothing between steps, and treats each row as if alone.
"""

from __future__ import annotations

from typing import Protocol

from unspool.sampling.candidates import Candidates
from unspool.sampling.penalties import (
    FrequencyPenalty,
    LogitBias,
    PresencePenalty,
    RepetitionPenalty,
)
from unspool.sampling.repeats import Dry, NoRepeatNgram
from unspool.sampling.rows import Rows
from unspool.sampling.temperature import DynamicTemperature, Temperature
from unspool.sampling.truncation import Eta, MinP, Mirostat, TopK, TopNSigma, TopP, Typical, Xtc


class Stage(Protocol):
    """One step of the chain, for all rows of a batch at once."""

    @property
    def name(self) -> str: ...

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates: ...


_ALL: tuple[Stage, ...] = (
    RepetitionPenalty(),
    FrequencyPenalty(),
    PresencePenalty(),
    NoRepeatNgram(),
    Dry(),
    LogitBias(),
    TopNSigma(),
    TopK(),
    Typical(),
    Eta(),
    TopP(),
    MinP(),
    Xtc(),
    DynamicTemperature(),
    Temperature(),
    Mirostat(),
)
STAGES: dict[str, Stage] = {stage.name: stage for stage in _ALL}
