"""All stages by name, and the interface of a stage.

A stage takes the candidates of all rows and returns the remaining ones, or the same with other
logits. It does not modify its input (but `revise` may overwrite the private copy of another
`revise`: `Candidates.is_scratch`), has no state, and treats each row independently.
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
    """One step of the chain, for all rows of a batch."""

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
