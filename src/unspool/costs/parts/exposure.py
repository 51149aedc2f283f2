"""Exposure bias: how errors accumulate when a model continues its own output.

Measured exactly on a source with a known distribution, with small models that the trainer makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unspool.costs.part import (
    CostPart,
    Example,
    Figure,
    MeasurementPlan,
    Series,
    TextMark,
    mean_figure,
)
from unspool.costs.texts import generate_batch, last_logits
from unspool.lm import LanguageModel
from unspool.model.hub.download import cache_folder

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
    from unspool.train.data.prepared import build_once

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
    from unspool.backends.placement import check_torch

    check_torch()
    from unspool.model.files.checkpoint import save_weights
    from unspool.train.learning.model_size import new_config, new_model, rates_for
    from unspool.train.learning.objectives import MitigatedNextToken
    from unspool.train.learning.optimizers import make_optimizers
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


TRAININGS: dict[str, dict[str, float]] = {
    "plain": {},
    "scheduled sampling 0.5": {"scheduled_sampling": 0.5},
    "unlikelihood 0.25": {"unlikelihood": 0.25},
}
_PURE: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
TEXTS = (256, 1024)  # by the source and by each model: quick and complete
_DRAWS = 1000
_TITLE = "Exposure bias: errors that accumulate after the model's own output"
_PLOT = "Excess accumulated error"
_FORMULA = (
    "ε(l) = 1/l · Σ_{t≤l} E_{w ~ source} KL(source ‖ model | w_<t), the error per step after the "
    "source's letters; R(l) = Σ_{t≤l} E_{w ~ model} KL(source ‖ model | w_<t), the sum of errors "
    "after the model's own; ExAccErr(l) = (R(l) − l·ε(l)) / (l·ε(l)) (Arora et al. 2022). 0: "
    "errors only add up; above 0 they amplify each other."
)
_ABOUT = (
    "Measured with small models trained on a Markov source (order 2, 16 letters), not with the "
    "model of this report: only with a known distribution can the error of a step be computed "
    "exactly. Reports differ by the seed."
)
_NO_TORCH = (
    "training the small models needs torch: pip install 'unspool[train]'; they are trained once"
)


@dataclass(frozen=True)
class StepErrors:
    """The error of every step of texts by the source and by the model: [texts, steps]."""

    after_source: NDArray[np.float64]
    after_model: NDArray[np.float64]
    model_texts: NDArray[np.int64]

    def excess(self) -> NDArray[np.float64]:
        """Return ExAccErr(l) for l from 1 on."""
        summed, expected = (
            errors.mean(0).cumsum() for errors in (self.after_model, self.after_source)
        )
        excess: NDArray[np.float64] = summed / expected - 1
        return excess

    def interval(self, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the 95 % bootstrap interval of ExAccErr; texts of both kinds are resampled."""
        random = np.random.default_rng(seed)
        sums = []
        for errors in (self.after_model, self.after_source):
            count = len(errors)
            weights = random.multinomial(count, np.full(count, 1 / count), _DRAWS)
            sums.append(weights @ errors.cumsum(1))
        low, high = np.percentile(sums[0] / sums[1] - 1, [2.5, 97.5], axis=0)
        return low, high


def measure(lm: LanguageModel, plan: MeasurementPlan) -> CostPart:
    """Train the small models, if they are not cached, and measure them."""
    from unspool.backends.placement import TorchMissingError

    source = MarkovSource(plan.seed)
    names = plan.pick(["plain"], list(TRAININGS))
    results: dict[str, StepErrors] = {}
    cooler: StepErrors | None = None
    try:
        for number, name in enumerate(names):

            def tell(share: float, number: int = number) -> object:
                return plan.on_progress((number + 0.7 * share) / len(names))

            folder = trained_model(source, **TRAININGS[name], tell=tell)
            with _loaded(folder) as small:
                count = plan.pick(*TEXTS)
                results[name] = measure_errors(small, source, count, temperature=1.0)
                if name == "plain" and not plan.quick:
                    cooler = measure_errors(small, source, count, temperature=0.7)
    except TorchMissingError:
        missing = Figure("ExAccErr", None, "%", why=_NO_TORCH)
        return CostPart("exposure", _TITLE, _FORMULA, [missing], notes=[_ABOUT])
    return _part(source, results, cooler)


def _loaded(folder: Any) -> LanguageModel:
    from unspool.loading import load

    return load(folder, device="cpu", memory=64 << 20, progress=False)


def measure_errors(
    lm: LanguageModel, source: MarkovSource, count: int, *, temperature: float
) -> StepErrors:
    """Measure a model's errors on `count` texts by the source and by the model."""
    true = source.texts(count, np.random.default_rng((source.seed, 1 << 30)))
    options = {**_PURE, "temperature": temperature, "max_tokens": LENGTH - 2, "end": False}
    written = generate_batch(lm, [row[:2].tolist() for row in true], **options)
    model_texts = np.array([[*text.prompt, *text.tokens] for text in written.texts])
    errors = [source.errors(texts, _logprobs(lm, texts)) for texts in (true, model_texts)]
    return StepErrors(errors[0], errors[1], model_texts)


def _logprobs(lm: LanguageModel, texts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the model's logprobs for each letter but the first two."""
    read = last_logits(lm, texts.tolist(), LENGTH - 2)
    logits = np.array([np.asarray(row, np.float64) for row in read])
    logits -= logits.max(2, keepdims=True)
    logprobs: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(2, keepdims=True))
    return logprobs


def _part(
    source: MarkovSource, results: dict[str, StepErrors], cooler: StepErrors | None
) -> CostPart:
    lengths = list(range(1, LENGTH - 1))
    figures: list[Figure] = []
    series: list[Series] = []
    plain = results["plain"]
    for name, errors in results.items():
        figures += _figures(name, errors)
        series.append(_series(name, errors, lengths))
    if cooler is not None:
        series.append(_series("plain, written at temperature 0.7", cooler, lengths))
    flat = [0.0] * len(lengths)
    series.append(Series("errors that only add up", lengths, flat, plot=_PLOT, kind="reference"))
    for name, step_errors in (("source's", plain.after_source), ("model's own", plain.after_model)):
        steps = step_errors.mean(0)
        series.append(
            Series(
                f"after the {name} letters", lengths, steps.tolist(), x_label="letter",
                y_label="KL, nats", plot="Error per step (plain training)",
            )
        )  # fmt: skip
    notes = [
        _ABOUT,
        "Scheduled sampling and unlikelihood are options of `unspool train`; they are compared by "
        "both numbers: the error per step, ε, and its amplification, ExAccErr. A remedy that "
        "lowers the second by raising the first gains nothing.",
    ]
    return CostPart("exposure", _TITLE, _FORMULA, figures, series, _example(source, plain), notes)


def _figures(name: str, errors: StepErrors) -> list[Figure]:
    low, high = errors.interval()
    steps, texts = errors.after_source.shape[1], len(errors.model_texts)
    return [
        Figure(
            f"ExAccErr, {name}", float(errors.excess()[-1]), "%", float(low[-1]),
            float(high[-1]), texts, f"l = {steps}; bootstrap over texts", "lower",
        ),
        mean_figure(
            f"ε, {name}", errors.after_source.mean(1).tolist(), "nats", better="lower",
            why=f"error per step after the source's letters, l = {steps}",
        ),
        mean_figure(
            f"R, {name}", errors.after_model.sum(1).tolist(), "nats", better="lower",
            why=f"sum of errors after the model's own letters, l = {steps}",
        ),
    ]  # fmt: skip


def _series(name: str, errors: StepErrors, lengths: Sequence[float]) -> Series:
    low, high = errors.interval()
    return Series(
        name, lengths, errors.excess().tolist(), low.tolist(), high.tolist(), "letters l",
        "ExAccErr(l)", _PLOT,
    )  # fmt: skip


def _example(source: MarkovSource, errors: StepErrors) -> Example:
    """Return the model's text with the largest sum of errors."""
    worst = int(errors.after_model.sum(1).argmax())
    text = "".join(LETTERS[letter] for letter in errors.model_texts[worst])
    threshold = float(np.quantile(errors.after_source, 0.99))
    lost = errors.after_model[worst] > max(threshold, 0.5)
    marks = [
        TextMark(at + 2, at + 3, "lost", f"KL {errors.after_model[worst, at]:.2f} nats")
        for at in np.flatnonzero(lost).tolist()
    ]
    return Example(
        text,
        marks,
        "The model's text with the largest sum of errors. Upper-case letters are a region that the "
        "source rarely enters; at marked letters the model's error is larger than at 99 % of the "
        "positions of the source's texts.",
    )
