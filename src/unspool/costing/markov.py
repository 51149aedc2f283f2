"""A text source with a known distribution, and small models trained on it.

The source is a Markov chain of order 2 over 16 letters. It stays among eight lower-case letters
nearly always. Once in thousands of letters it enters the eight upper-case ones and stays there for
a while: a region that training hardly covers. A model with errors enters it more often than the
source, and makes more errors there. The true distribution of each next letter is a row of a table,
so the error of a model is known exactly, after the source's letters and after the model's.
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
    from unspool.train.data.batches import TrainingBatch

LETTERS = "abcdefghABCDEFGH"
LENGTH = 64  # letters of a text, the first two given
_HALF = len(LETTERS) // 2
_ENTER, _STAY = 0.0002, 0.95  # probability of upper case after lower case and after upper case
_CONCENTRATION = 0.3  # of the Dirichlet distribution of the table's rows: few likely letters
_FLOOR = 1e-5  # minimum probability, so that every error is finite
STEPS = 200  # of training
_ROWS = 16  # texts per step
_VERSION = 1  # of the models in the cache


@dataclass(frozen=True)
class MarkovSource:
    """The table of true probabilities, drawn by a seed."""

    seed: int = 0

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """Probabilities [second to last, last, next letter]."""
        random, count = np.random.default_rng(self.seed), len(LETTERS)
        lower, upper = random.dirichlet([_CONCENTRATION] * _HALF, (2, count, count))
        is_upper = np.arange(count) >= _HALF
        to_upper = np.where(is_upper, _STAY, _ENTER)[None, :, None]
        table = np.concatenate((lower * (1 - to_upper), upper * to_upper), axis=2)
        return (1 - _FLOOR) * table + _FLOOR / count

    def texts(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Draw `count` texts of LENGTH letters, each starting with two lower-case letters."""
        texts = np.empty((count, LENGTH), np.int64)
        texts[:, :2] = random.integers(0, _HALF, (count, 2))
        cumulative = self.probabilities.cumsum(2)
        for at in range(2, LENGTH):
            thresholds = cumulative[texts[:, at - 2], texts[:, at - 1]]
            letters = (random.random((count, 1)) > thresholds).sum(1)
            texts[:, at] = np.minimum(letters, len(LETTERS) - 1)
        return texts

    def errors(
        self, texts: NDArray[np.int64], logprobs: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return KL(source || model) at each letter but the first two.

        `logprobs` [texts, LENGTH - 2, letters] are the model's.
        """
        true = self.probabilities[texts[:, :-2], texts[:, 1:-1]]
        divergence: NDArray[np.float64] = (true * (np.log(true) - logprobs)).sum(2)
        return divergence


class _Texts:
    """New texts of the source at every training step."""

    def __init__(self, source: MarkovSource) -> None:
        self.source = source

    def batch(self, step: int) -> TrainingBatch:
        import torch

        from unspool.train.data.batches import TrainingBatch

        random = np.random.default_rng((self.source.seed, step))
        return TrainingBatch(torch.from_numpy(self.source.texts(_ROWS, random)))


def trained_model(
    source: MarkovSource,
    scheduled_sampling: float = 0.0,
    unlikelihood: float = 0.0,
    tell: Callable[[float], object] = lambda share: None,
) -> Path:
    """Return the folder of a small model trained on the source, from the cache if possible.

    Training needs torch.
    """
    from unspool.train.data.made_once import build_once

    key = f"{source.seed}-{scheduled_sampling:g}-{unlikelihood:g}-{STEPS}"
    target = cache_folder() / "costs" / f"markov-v{_VERSION}-{key}"

    def make(folder: Path) -> None:
        _train(source, scheduled_sampling, unlikelihood, tell, folder)

    return build_once(target, make)


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

    if trainer.run(listen).state != "done":  # Ctrl-C ends training after the current step
        raise KeyboardInterrupt
    save_weights(config, model.state_dict(), folder)
