"""Decoding options side by side: their effect on texts and their cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from unspool.costs.part import (
    CostPart,
    Example,
    Figure,
    MeasurementPlan,
    TextMark,
    mean_figure,
    share_figure,
)
from unspool.costs.parts.loops import loop_period
from unspool.costs.texts import distinct_n, encode_with_start, excerpts, generate_batch
from unspool.decoding.branches import mean_logprob
from unspool.engine.generation import Generation
from unspool.errors import UnspoolError
from unspool.lm import LanguageModel
from unspool.sampling.monitors import repetition_rate

_SAMPLES = 5
_ANSWER_TOKENS = 6
_MAX_REASONING = 24  # tokens of reasoning with budget forcing ...
_TAGS = 12  # ... and of the tags, if they are plain text for the model
_CLOSE = "</think>"
_EXAMPLES = "Q: What is 4 + 3?\nA: 4 + 3 = 7\n\nQ: What is 6 + 8?\nA: 6 + 8 = 14\n\n"
_FORCED = "budget forcing"


def extract_number(text: str) -> str:
    """Return the answer in a text, "" if there is none; reasoning is ignored.

    It is the number after the first = of the first line, or else the first number.
    """
    line = text.rpartition(_CLOSE)[2].strip().partition("\n")[0]
    match = re.search(r"=\s*(\d+)", line) or re.search(r"(\d+)", line)
    return "" if match is None else match[1]


POLICIES: dict[str, dict[str, Any]] = {
    "one sample": {"policy": "best-of", "n": 1},
    f"vote of {_SAMPLES}": {
        "policy": "vote",
        "n": _SAMPLES,
        "extract": lambda text: extract_number(text.text),
    },
    f"best of {_SAMPLES}, the likeliest": {"policy": "best-of", "n": _SAMPLES},
    f"best of {_SAMPLES}, asked yes or no": {"policy": "best-of", "n": _SAMPLES, "judge": "ask"},
    _FORCED: {
        "policy": "think",
        "max_thinking": _MAX_REASONING,
        "max_tokens": _MAX_REASONING + _TAGS + 12,
    },
}


@dataclass(frozen=True)
class Sum:
    """A sum of two numbers."""

    a: int
    b: int

    def prompt(self, thinking: bool = False) -> str:
        """Return the prompt, after two examples; with `thinking`, without a started answer."""
        start = "" if thinking else f" {self.a} + {self.b} ="
        return f"{_EXAMPLES}Q: What is {self.a} + {self.b}?\nA:{start}"

    def is_right(self, text: str) -> bool:
        """Return whether a text gives the correct answer."""
        return extract_number(text) == str(self.a + self.b)


@dataclass(frozen=True)
class SumResult:
    """Accuracy and cost of one decoding policy."""

    name: str
    right: int
    count: int
    tokens: int  # computed
    seconds: float

    def figure(self, baseline: SumResult) -> Figure:
        """Return the share of correct answers, with the cost relative to `baseline`."""
        tokens = self.tokens / self.count
        why = f"{tokens:.0f} tokens and {self.seconds / self.count:.2f} s per sum"
        if self is not baseline:
            token_ratio = tokens * baseline.count / baseline.tokens
            time_ratio = self.seconds / self.count * baseline.count / baseline.seconds
            why += f": {token_ratio:.1f}× and {time_ratio:.1f}× those of {baseline.name}"
        return share_figure(
            f"sums right, {self.name}", self.right, self.count, better="higher", why=why
        )


def make_sums(count: int) -> list[Sum]:
    """Return `count` different small sums."""
    return [Sum(2 + number * 7 % 9, 1 + number * 5 % 8) for number in range(count)]


def sum_figures(
    lm: LanguageModel,
    problems: Sequence[Sum],
    ways: Sequence[str],
    seed: int,
    tell: Callable[[float], object],
) -> tuple[list[Figure], list[str]]:
    """Return a figure for each policy, and error messages of those that failed."""
    results: list[SumResult] = []
    failed: list[str] = []
    for number, name in enumerate(ways):
        try:
            results.append(answer_sums(lm, name, problems, seed))
        except UnspoolError as error:  # a context that is too short, a model without a template
            failed.append(f"{name}: {error}")
        tell((number + 1) / len(ways))
    return [result.figure(results[0]) for result in results], failed


def answer_sums(lm: LanguageModel, name: str, problems: Sequence[Sum], seed: int) -> SumResult:
    """Answer all sums with one policy. Prefill is not measured."""
    right = tokens = 0
    seconds = 0.0
    for problem in problems:
        prompt = encode_with_start(lm, problem.prompt(thinking=name == _FORCED))
        lm.generate(prompt, max_tokens=1)
        started = perf_counter()
        options = {"max_tokens": _ANSWER_TOKENS, **POLICIES[name]}
        result = lm.think(prompt, budget=None, seed=seed, progress=False, **options)
        seconds += perf_counter() - started
        right += problem.is_right(result.text)
        tokens += result.spent.written + result.spent.judged
    return SumResult(name, right, len(problems), tokens, seconds)


_BRANCHES = 4
_SAMPLING = "default sampling"
_FORMULA = (
    "The same openings, continued with each option. Likelihood = mean log p per token of the "
    "unmodified model. Cost = tokens computed / tokens kept, and seconds per kept token, both "
    "relative to greedy. Sums right = share of small sums answered correctly, by policy of "
    "test-time compute."
)


@dataclass(frozen=True)
class RemedyOutcome:
    """The texts of one option, and their cost."""

    name: str
    texts: list[list[int]]
    logprobs: list[float]  # mean per token of each text
    computed: int
    seconds: float
    first_text: str = ""
    is_sampled: bool = False  # compared with default samples instead of greedy texts

    @property
    def num_kept(self) -> int:
        return sum(map(len, self.texts))

    def row(self, usual: RemedyOutcome) -> list[str]:
        """Return the option's row in the table, with costs relative to `usual`."""
        loops = sum(loop_period(text) is not None for text in self.texts) / len(self.texts)
        tokens = (self.computed / self.num_kept) / (usual.computed / usual.num_kept)
        seconds = (self.seconds / self.num_kept) / (usual.seconds / usual.num_kept)
        return [
            self.name,
            f"{np.mean(self.logprobs):.2f}",
            f"{loops:.0%}",
            f"{np.mean([repetition_rate(text) for text in self.texts]):.0%}",
            f"{distinct_n(self.texts):.0%}",
            f"{tokens:.2f}×",
            f"{seconds:.2f}×",
        ]


@dataclass(frozen=True)
class _RemedyJob:
    """Prompts and settings for all options."""

    lm: LanguageModel
    prompts: Sequence[Sequence[int]]
    length: int
    seed: int
    twin: Any
    edited_count: int  # prompts for the edit option, which takes by far the longest ...
    places: int  # ... and words edited in each

    @property
    def piece(self) -> int:
        """Tokens per step of a search."""
        return max(1, self.length // 4)

    def with_options(self, name: str, **options: Any) -> RemedyOutcome:
        """Generate with sampling options, all prompts in one batch."""
        written = generate_batch(
            self.lm, self.prompts, max_tokens=self.length, seed=self.seed, **options
        )
        return _outcome(name, written.texts, written.computed, written.seconds)

    def beams(self, name: str) -> RemedyOutcome:
        started = perf_counter()
        texts = [
            self.lm.beam(prompt, beams=_BRANCHES, max_tokens=self.length).best
            for prompt in self.prompts
        ]
        computed = _BRANCHES * sum(len(text.steps) for text in texts)
        return _outcome(name, texts, computed, perf_counter() - started)

    def searched(self, name: str, **options: Any) -> RemedyOutcome:
        """Search with a policy for each prompt."""
        options = {"max_tokens": self.length, "seed": self.seed, **options}
        results = [
            self.lm.think(prompt, budget=None, progress=False, **options) for prompt in self.prompts
        ]
        computed = sum(result.spent.written + result.spent.judged for result in results)
        seconds = sum(result.seconds for result in results)
        texts = [result.best for result in results]
        return _outcome(name, texts, computed, seconds, is_sampled=True)

    def edited(self, name: str, twin: Any = None) -> RemedyOutcome:
        """Edit default samples in one pass."""
        started = perf_counter()
        prompts = self.prompts[: self.edited_count]
        samples = generate_batch(self.lm, prompts, max_tokens=self.length, seed=self.seed)
        texts, logprobs, computed, first_text = [], [], samples.computed, ""
        for prompt, text in zip(prompts, samples.texts, strict=True):
            before = self.lm.tokenizer.decode(prompt, specials=False)
            edit = self.lm.edit(
                before + text.text,
                twin=twin,
                passes=1,
                places=self.places,
                candidates=6,
                progress=False,
            )
            computed += edit.weighed
            scored = edit.after.positions[len(self.lm.tokenizer.encode(before)) :]
            texts.append([position.token for position in scored])
            mean = np.mean([position.logprob or 0.0 for position in scored] or [0.0])
            logprobs.append(float(mean))
            first_text = first_text or edit.text[len(before) :]
        return RemedyOutcome(
            name, texts, logprobs, computed, perf_counter() - started, first_text, True
        )


def _outcome(
    name: str, texts: Sequence[Generation], computed: int, seconds: float, is_sampled: bool = False
) -> RemedyOutcome:
    nonempty = [text for text in texts if text.steps]
    return RemedyOutcome(
        name,
        [text.tokens for text in nonempty],
        [mean_logprob(text) for text in nonempty],
        computed,
        seconds,
        nonempty[0].text if nonempty else "",
        is_sampled,
    )


def measure(lm: LanguageModel, plan: MeasurementPlan) -> CostPart:
    length = min(plan.pick(16, 64), lm.context // 2)
    prompts = excerpts(lm, plan.texts, plan.pick(3, 8), min(33, lm.context // 4))
    job = _RemedyJob(lm, prompts, length, plan.seed, plan.twin, plan.pick(1, 4), plan.pick(2, 4))
    generate_batch(lm, prompts, max_tokens=1)  # prefill, so that no option is charged for it
    options = _options(job, plan.quick)
    outcomes: list[RemedyOutcome] = []
    failed: list[str] = []
    for number, (name, run) in enumerate(options.items()):
        try:
            outcome = run(name)
        except UnspoolError as error:  # a model that cannot be rewound, or without a head
            failed.append(f"{name}: {error}")
        else:
            if outcome.texts:
                outcomes.append(outcome)
        plan.on_progress(0.8 * (number + 1) / len(options))
    answered, unanswered = sum_figures(
        lm, make_sums(plan.pick(6, 32)), list(POLICIES)[: plan.pick(2, len(POLICIES))], plan.seed,
        lambda share: plan.on_progress(0.8 + 0.2 * share),
    )  # fmt: skip
    greedy = outcomes[0]
    head = ["option", "log p per token", "loops", "repeated", "variety", "tokens", "seconds"]
    return CostPart(
        "remedies",
        "Remedies side by side, with their cost",
        _FORMULA,
        [*(_gain(_baseline_of(other, outcomes), other) for other in outcomes[1:]), *answered],
        (),
        _example(outcomes),
        [
            f"{len(prompts)} openings, up to {length} tokens each. Searches and edits start from "
            "default samples and are compared with those, the others with greedy texts.",
            "Beams and searches compute every branch and keep one; they run one opening after the "
            "other, the other options all in one batch. Drafts only change the time.",
            f"Restarts: {_BRANCHES} starts of {job.piece} tokens, of which the likeliest is "
            "continued. Step-wise beam and DVTS: the likelier half of four texts continues after "
            f"every {job.piece} tokens; DVTS keeps one per subtree. Budget forcing writes the "
            "think tags itself: models that were not trained to reason gain nothing by it.",
            f"Edit revises default samples (openings: {job.edited_count}), and compares candidates "
            f"at {job.places} uncertain words of each.",
            *failed,
            *unanswered,
        ],
        [head, *(outcome.row(greedy) for outcome in outcomes)],
    )


def _options(job: _RemedyJob, quick: bool) -> dict[str, Callable[[str], RemedyOutcome]]:
    """Return all options by name, greedy first."""
    pieces: dict[str, Any] = {"step": "tokens", "tokens": job.piece}
    options: dict[str, Callable[[str], RemedyOutcome]] = {
        "greedy": partial(job.with_options, temperature=0.0),
        _SAMPLING: job.with_options,
        "loop guard": partial(job.with_options, temperature=0.0, guard="loop"),
        "DRY 0.8": partial(job.with_options, temperature=0.0, dry_multiplier=0.8),
        "lookup drafts": partial(job.with_options, temperature=0.0, speculate="lookup"),
        f"beams {_BRANCHES}": job.beams,
        f"best of {_BRANCHES}": partial(job.searched, policy="best-of", n=_BRANCHES),
        "restarts": partial(job.searched, policy="restarts", k=_BRANCHES, tokens=job.piece),
        "step-wise beam": partial(job.searched, policy="beam", keep=2, width=2, **pieces),
        "edit": job.edited,
    }
    if not quick:
        best_of: dict[str, Any] = {"policy": "best-of", "n": _BRANCHES}
        options[f"best of {_BRANCHES}, the surest"] = partial(
            job.searched, judge="certainty", **best_of
        )
        options["DVTS"] = partial(job.searched, policy="dvts", subtrees=2, width=2, **pieces)
    if job.twin is not None:
        options["edit with the masked model"] = partial(job.edited, twin=job.twin)
    return options


def _baseline_of(outcome: RemedyOutcome, outcomes: Sequence[RemedyOutcome]) -> RemedyOutcome:
    """Return the baseline of an option: default sampling for sampled ones, else greedy."""
    is_sampled = outcome.is_sampled
    return next(
        (other for other in outcomes if is_sampled and other.name == _SAMPLING), outcomes[0]
    )


def _gain(usual: RemedyOutcome, other: RemedyOutcome) -> Figure:
    """Return the gain in nats per token over the baseline, paired by opening."""
    pairs = [b - a for a, b in zip(usual.logprobs, other.logprobs, strict=False)]
    return mean_figure(
        f"likelihood, {other.name} − {usual.name}", pairs, "nats/token", why="paired by opening"
    )


def _example(outcomes: Sequence[RemedyOutcome]) -> Example | None:
    """Return the same opening with each option."""
    texts = [(item.name, " ".join(item.first_text.split())) for item in outcomes if item.first_text]
    text, marks = "", []
    for name, written in texts:
        marks.append(TextMark(len(text), len(text) + len(name), "option"))
        text += f"{name}: {written}\n\n"
    caption = "One opening, continued with each option."
    return Example(text.rstrip("\n"), marks, caption) if texts else None
