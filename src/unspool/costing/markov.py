"""A source of text whose true distribution is known, and small models trained on it.

The source is a Markov chain of order 2 over 16 letters: what comes next depends on the last two.
Nearly always it stays among eight lower-case letters. Once in thousands of letters it turns to the
eight upper-case ones, and lingers there: a region that training hardly shows. A model that errs
comes there more often than the source does, and errs more once it is there, as writers do who have
left what they know. For any two letters the true chances of the next are a line of a table, so the
error of a model is known exactly, behind the source's own letters and behind the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unspool.model.packaged import cache_folder

if TYPE_CHECKING:
    from unspool.train.data.batches import Batch

LETTERS = "abcdefghABCDEFGH"
LENGTH = 64  # letters of a text, two of them given
_HALF = len(LETTERS) // 2
_TURN, _STAY = 0.0002, 0.95  # the chance of an upper-case letter behind a lower- and an upper-case
_FEW = (
    0.3  # of the Dirichlet distribution that the table's lines are drawn from: few likely letters
)
_FLOOR = 1e-5  # nothing is impossible, so that every error is a finite number
STEPS = 200  # of the training, each of so many texts:
_ROWS = 16
_VERSION = 1  # of the models in the cache


@dataclass(frozen=True)
class MarkovSource:
    """The table of true chances, drawn by a seed."""

    seed: int = 0

    @cached_property
    def chances(self) -> NDArray[np.float64]:
        """[last but one, last, next]"""
        random, count = np.random.default_rng(self.seed), len(LETTERS)
        lower, upper = random.dirichlet([_FEW] * _HALF, (2, count, count))
        behind_upper = np.arange(count) >= _HALF
        turns = np.where(behind_upper, _STAY, _TURN)[None, :, None]
        table = np.concatenate((lower * (1 - turns), upper * turns), axis=2)
        return (1 - _FLOOR) * table + _FLOOR / count

    def texts(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """So many texts of LENGTH letters, each begun with two lower-case ones."""
        found = np.empty((count, LENGTH), np.int64)
        found[:, :2] = random.integers(0, _HALF, (count, 2))
        reached = self.chances.cumsum(2)
        for at in range(2, LENGTH):
            behind = reached[found[:, at - 2], found[:, at - 1]]
            drawn = (random.random((count, 1)) > behind).sum(1)
            found[:, at] = np.minimum(drawn, len(LETTERS) - 1)
        return found

    def errors(
        self, texts: NDArray[np.int64], logprobs: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """KL(source || model) of each letter but the first two, behind the letters before it:
        `logprobs` [texts, LENGTH - 2, letters] are the model's."""
        true = self.chances[texts[:, :-2], texts[:, 1:-1]]
        divergence: NDArray[np.float64] = (true * (np.log(true) - logprobs)).sum(2)
        return divergence


class _Texts:
    """Fresh texts of the source at every step."""

    def __init__(self, source: MarkovSource) -> None:
        self.source = source

    def batch(self, step: int) -> Batch:
        import torch

        from unspool.train.data.batches import Batch

        random = np.random.default_rng((self.source.seed, step))
        return Batch(torch.from_numpy(self.source.texts(_ROWS, random)))


def trained_model(
    source: MarkovSource,
    scheduled_sampling: float = 0.0,
    unlikelihood: float = 0.0,
    tell: Callable[[float], object] = lambda share: None,
) -> Path:
    """The folder of a small model that was trained on the source, now or earlier; needs torch."""
    from unspool.train.data.made_once import made_once

    dials = f"{source.seed}-{scheduled_sampling:g}-{unlikelihood:g}-{STEPS}"
    target = cache_folder() / "costs" / f"markov-v{_VERSION}-{dials}"

    def make(folder: Path) -> None:
        _train(source, scheduled_sampling, unlikelihood, tell, folder)

    return made_once(target, make)


def _train(
    source: MarkovSource,
    scheduled_sampling: float,
    unlikelihood: float,
    tell: Callable[[float], object],
    folder: Path,
) -> None:
    from unspool.backends.torch.available import check_torch

    check_torch()
    from unspool.model.checkpoint import save_weights
    from unspool.train.learning.mitigations import MitigatedNextToken
    from unspool.train.learning.optimizers import make_optimizers
    from unspool.train.learning.shape import new_config, new_model, rates_for
    from unspool.train.running.loop import Trainer, TrainSettings

    config = new_config(2, len(LETTERS), LENGTH, width=32)
    model = new_model(config, source.seed)
    trainer = Trainer(
        model,
        _Texts(source),
        MitigatedNextToken(scheduled_sampling, unlikelihood),
        make_optimizers(model, rates_for(config).times(0.3), "adamw"),
        TrainSettings(steps=STEPS, warmup=STEPS // 20, decay=0.5, seed=source.seed),
    )

    def listen(event: Any) -> None:
        tell(getattr(event, "step", 0) / STEPS)

    if trainer.run(listen).state != "done":  # Ctrl-C ends a training after the step at hand
        raise KeyboardInterrupt
    save_weights(config, model.state_dict(), folder)
