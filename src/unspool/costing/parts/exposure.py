"""Exposure bias, exactly: how errors add up when a model goes on from its own words.

Measured on a source whose true distribution is known, with small models that our trainer makes:
with no other text can the error of every single step be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unspool.costing.markov import LENGTH, LETTERS, MarkovSource, trained_model
from unspool.costing.part import Example, Figure, Mark, Part, Series
from unspool.costing.plan import Plan
from unspool.costing.reading import last_logits
from unspool.costing.statistics import mean_figure
from unspool.costing.writing import write
from unspool.language_model import LanguageModel

TRAININGS: dict[str, dict[str, float]] = {
    "plain": {},
    "scheduled sampling 0.5": {"scheduled_sampling": 0.5},
    "unlikelihood 0.25": {"unlikelihood": 0.25},
}
_PURE: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
TEXTS = (256, 1024)  # by the source and by each model: in a hurry, and otherwise
_DRAWS = 1000
_TITLE = "Exposure bias: errors that add up behind one's own words"
_PLOT = "Excess accumulated error"
_FORMULA = (
    "ε(l) = 1/l · Σ_{t≤l} E_{w ~ source} KL(source ‖ model | w_<t), the error a step behind the "
    "source's letters; R(l) = Σ_{t≤l} E_{w ~ model} KL(source ‖ model | w_<t), the errors summed "
    "behind the model's own; ExAccErr(l) = (R(l) − l·ε(l)) / (l·ε(l)) (Arora et al. 2022). 0: "
    "errors only add up; above 0 they breed."
)
_ABOUT = (
    "The models here are small ones trained on a Markov source (order 2, 16 letters) whose "
    "true distribution is known, and not the model of this report: of no other text can the error "
    "of a step be computed exactly. What differs between reports is the seed."
)
_NO_TORCH = (
    "training the small models needs torch: pip install 'unspool[train]'; they are made once"
)


@dataclass(frozen=True)
class Errors:
    """The error of every step, of texts by the source and of texts by the model: [texts, steps]."""

    behind_source: NDArray[np.float64]
    behind_model: NDArray[np.float64]
    own: NDArray[np.int64]  # the texts that the model wrote

    def excess(self) -> NDArray[np.float64]:
        """ExAccErr(l) for each l from 1 on."""
        summed, expected = (
            errors.mean(0).cumsum() for errors in (self.behind_model, self.behind_source)
        )
        found: NDArray[np.float64] = summed / expected - 1
        return found

    def interval(self, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Its 95 % interval: texts of both kinds drawn again."""
        random = np.random.default_rng(seed)
        drawn = []
        for errors in (self.behind_model, self.behind_source):
            count = len(errors)
            weights = random.multinomial(count, np.full(count, 1 / count), _DRAWS)
            drawn.append(weights @ errors.cumsum(1))
        low, high = np.percentile(drawn[0] / drawn[1] - 1, [2.5, 97.5], axis=0)
        return low, high


def measure(lm: LanguageModel, plan: Plan) -> Part:
    """Train the small models, if they are not there, and measure them."""
    from unspool.backends.torch.available import TorchMissingError

    source = MarkovSource(plan.seed)
    names = plan.pick(["plain"], list(TRAININGS))
    found: dict[str, Errors] = {}
    cooler: Errors | None = None
    try:
        for number, name in enumerate(names):

            def tell(share: float, number: int = number) -> object:
                return plan.tell((number + 0.7 * share) / len(names))

            folder = trained_model(source, **TRAININGS[name], tell=tell)
            with _loaded(folder) as small:
                count = plan.pick(*TEXTS)
                found[name] = errors_of(small, source, count, temperature=1.0)
                if name == "plain" and not plan.quick:
                    cooler = errors_of(small, source, count, temperature=0.7)
    except TorchMissingError:
        missing = Figure("ExAccErr", None, "%", why=_NO_TORCH)
        return Part("exposure", _TITLE, _FORMULA, [missing], notes=[_ABOUT])
    return _part(source, found, cooler)


def _loaded(folder: Any) -> LanguageModel:
    from unspool.loading import load

    return load(folder, device="cpu", memory=64 << 20, progress=False)


def errors_of(lm: LanguageModel, source: MarkovSource, count: int, *, temperature: float) -> Errors:
    """The errors of a model of the source's letters, on so many texts by either."""
    true = source.texts(count, np.random.default_rng((source.seed, 1 << 30)))
    options = {**_PURE, "temperature": temperature, "max_tokens": LENGTH - 2, "end": False}
    written = write(lm, [row[:2].tolist() for row in true], **options)
    own = np.array([[*text.prompt, *text.tokens] for text in written.texts])
    behind = [source.errors(texts, _logprobs(lm, texts)) for texts in (true, own)]
    return Errors(behind[0], behind[1], own)


def _logprobs(lm: LanguageModel, texts: NDArray[np.int64]) -> NDArray[np.float64]:
    """What the model expected of each letter but the first two."""
    read = last_logits(lm, texts.tolist(), LENGTH - 2)
    logits = np.array([np.asarray(one, np.float64) for one in read])
    logits -= logits.max(2, keepdims=True)
    found: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(2, keepdims=True))
    return found


# -- what is told of it ---------------------------------------------------------------------


def _part(source: MarkovSource, found: dict[str, Errors], cooler: Errors | None) -> Part:
    lengths = list(range(1, LENGTH - 1))
    figures: list[Figure] = []
    series: list[Series] = []
    plain = found["plain"]
    for name, errors in found.items():
        figures += _figures(name, errors)
        series.append(_series(name, errors, lengths))
    if cooler is not None:
        series.append(_series("plain, written at temperature 0.7", cooler, lengths))
    flat = [0.0] * len(lengths)
    series.append(Series("errors that only add up", lengths, flat, plot=_PLOT, kind="reference"))
    for name, behind in (("source's", plain.behind_source), ("model's own", plain.behind_model)):
        steps = behind.mean(0)
        series.append(
            Series(
                f"behind the {name} letters", lengths, steps.tolist(), x_label="letter",
                y_label="KL, nats", plot="The error of a step (plain training)",
            )
        )  # fmt: skip
    notes = [
        _ABOUT,
        "Scheduled sampling and unlikelihood are options of `unspool train`; here they are judged "
        "by both numbers: the error a step, ε, and how it breeds, ExAccErr. A remedy that "
        "lowers the second by raising the first has bought nothing.",
    ]
    return Part("exposure", _TITLE, _FORMULA, figures, series, _example(source, plain), notes)


def _figures(name: str, errors: Errors) -> list[Figure]:
    low, high = errors.interval()
    steps, texts = errors.behind_source.shape[1], len(errors.own)
    return [
        Figure(
            f"ExAccErr, {name}", float(errors.excess()[-1]), "%", float(low[-1]),
            float(high[-1]), texts, f"l = {steps}; bootstrap over texts", "lower",
        ),
        mean_figure(
            f"ε, {name}", errors.behind_source.mean(1).tolist(), "nats", better="lower",
            why=f"the error a step behind the source's letters, l = {steps}",
        ),
        mean_figure(
            f"R, {name}", errors.behind_model.sum(1).tolist(), "nats", better="lower",
            why=f"the errors of a text behind the model's own letters, l = {steps}",
        ),
    ]  # fmt: skip


def _series(name: str, errors: Errors, lengths: Sequence[float]) -> Series:
    low, high = errors.interval()
    return Series(
        name, lengths, errors.excess().tolist(), low.tolist(), high.tolist(), "letters l",
        "ExAccErr(l)", _PLOT,
    )  # fmt: skip


def _example(source: MarkovSource, errors: Errors) -> Example:
    """The text in which the model lost its way the most."""
    worst = int(errors.behind_model.sum(1).argmax())
    text = "".join(LETTERS[letter] for letter in errors.own[worst])
    usual = float(np.quantile(errors.behind_source, 0.99))
    lost = errors.behind_model[worst] > max(usual, 0.5)
    marks = [
        Mark(at + 2, at + 3, "lost", f"KL {errors.behind_model[worst, at]:.2f} nats")
        for at in np.flatnonzero(lost).tolist()
    ]
    return Example(
        text,
        marks,
        "A text by the model, the one with the largest sum of errors. Upper-case letters are a "
        "region that the source hardly ever enters; marked letters follow a place where the model "
        "is further from the truth than at 99 % of the source's places.",
    )
