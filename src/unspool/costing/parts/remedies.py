"""Remedies side by side: what each option does to a text, and its price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from unspool.costing.part import Example, Figure, Mark, Part
from unspool.costing.parts.loops import period
from unspool.costing.plan import Plan
from unspool.costing.statistics import mean_figure
from unspool.costing.sums import WAYS, sum_figures, sums
from unspool.costing.writing import distinct, excerpts, write
from unspool.decoding.written import mean_logprob
from unspool.engine.generation import Generation
from unspool.errors import UnspoolError
from unspool.language_model import LanguageModel
from unspool.sampling.loops import repetition_rate

_BRANCHES = 4
_SAMPLING = "usual sampling"
_FORMULA = (
    "The same openings, continued with each option. Likelihood = mean log p a token by the bare "
    "model. Price = tokens computed / tokens kept, and seconds a token kept, both as multiples of "
    "greedy. Sums right = share of small sums whose answer is right, by each way of thinking "
    "longer."
)


@dataclass(frozen=True)
class Outcome:
    """What one option wrote, and what that took."""

    name: str
    texts: list[list[int]]
    logprobs: list[float]  # of each text, a token on average
    computed: int
    seconds: float
    shown: str = ""  # the first text
    drawn: bool = False  # from usual samples, which it is then compared with; else from greedy ones

    @property
    def kept(self) -> int:
        return sum(map(len, self.texts))

    def row(self, usual: Outcome) -> list[str]:
        """The option in the table; `usual` is what it is compared with."""
        loops = sum(period(text) is not None for text in self.texts) / len(self.texts)
        tokens = (self.computed / self.kept) / (usual.computed / usual.kept)
        seconds = (self.seconds / self.kept) / (usual.seconds / usual.kept)
        return [
            self.name,
            f"{np.mean(self.logprobs):.2f}",
            f"{loops:.0%}",
            f"{np.mean([repetition_rate(text) for text in self.texts]):.0%}",
            f"{distinct(self.texts):.0%}",
            f"{tokens:.2f}×",
            f"{seconds:.2f}×",
        ]


@dataclass(frozen=True)
class _Job:
    """Openings, and how far they are continued."""

    lm: LanguageModel
    prompts: Sequence[Sequence[int]]
    length: int
    seed: int
    twin: Any
    edited_count: int  # openings that are gone over: weighing words takes the longest by far ...
    places: int  # ... and how many words of each

    @property
    def piece(self) -> int:
        """Tokens by which a search grows its texts."""
        return max(1, self.length // 4)

    def with_options(self, name: str, **options: Any) -> Outcome:
        """Left to right with some option, all in one batch."""
        made = write(self.lm, self.prompts, max_tokens=self.length, seed=self.seed, **options)
        return _outcome(name, made.texts, made.computed, made.seconds)

    def beams(self, name: str) -> Outcome:
        started = perf_counter()
        texts = [
            self.lm.beam(prompt, beams=_BRANCHES, max_tokens=self.length).best
            for prompt in self.prompts
        ]
        computed = _BRANCHES * sum(len(text.steps) for text in texts)
        return _outcome(name, texts, computed, perf_counter() - started)

    def thought(self, name: str, **options: Any) -> Outcome:
        """A search for each opening, by a policy and a judge."""
        options = {"max_tokens": self.length, "seed": self.seed, **options}
        found = [
            self.lm.think(prompt, budget=None, progress=False, **options) for prompt in self.prompts
        ]
        computed = sum(one.spent.written + one.spent.judged for one in found)
        seconds = sum(one.seconds for one in found)
        return _outcome(name, [one.best for one in found], computed, seconds, drawn=True)

    def edited(self, name: str, twin: Any = None) -> Outcome:
        """Usual samples, gone over once."""
        started = perf_counter()
        prompts = self.prompts[: self.edited_count]
        made = write(self.lm, prompts, max_tokens=self.length, seed=self.seed)
        texts, logprobs, computed, shown = [], [], made.computed, ""
        for prompt, text in zip(prompts, made.texts, strict=True):
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
            behind = edit.after.positions[len(self.lm.tokenizer.encode(before)) :]
            texts.append([one.token for one in behind])
            logprobs.append(float(np.mean([one.logprob or 0.0 for one in behind] or [0.0])))
            shown = shown or edit.text[len(before) :]
        return Outcome(name, texts, logprobs, computed, perf_counter() - started, shown, True)


def _outcome(
    name: str, texts: Sequence[Generation], computed: int, seconds: float, drawn: bool = False
) -> Outcome:
    known = [text for text in texts if text.steps]
    return Outcome(
        name,
        [text.tokens for text in known],
        [mean_logprob(text) for text in known],
        computed,
        seconds,
        known[0].text if known else "",
        drawn,
    )


def measure(lm: LanguageModel, plan: Plan) -> Part:
    length = min(plan.pick(16, 64), lm.context // 2)
    prompts = excerpts(lm, plan.texts, plan.pick(3, 8), min(33, lm.context // 4))
    job = _Job(lm, prompts, length, plan.seed, plan.twin, plan.pick(1, 4), plan.pick(2, 4))
    write(lm, prompts, max_tokens=1)  # the openings are read, so that nobody pays for it
    options = _options(job, plan.quick)
    found: list[Outcome] = []
    failed: list[str] = []
    for number, (name, run) in enumerate(options.items()):
        try:
            outcome = run(name)
        except UnspoolError as error:  # a model that cannot be rewound, or without a head
            failed.append(f"{name}: {error}")
        else:
            if outcome.texts:
                found.append(outcome)
        plan.tell(0.8 * (number + 1) / len(options))
    answered, unanswered = sum_figures(
        lm, sums(plan.pick(6, 32)), list(WAYS)[: plan.pick(2, len(WAYS))], plan.seed,
        lambda share: plan.tell(0.8 + 0.2 * share),
    )  # fmt: skip
    usual = found[0]
    head = ["option", "log p a token", "loops", "repeated", "variety", "tokens", "seconds"]
    return Part(
        "remedies",
        "Remedies side by side, with their price",
        _FORMULA,
        [
            *(_gain(_compared_with(other, found), other) for other in found[1:]),
            *answered,
        ],
        (),
        _example(found),
        [
            f"{len(prompts)} openings, up to {length} tokens each. Searches and edits begin with "
            "usual samples and are compared with those, the others with greedy texts.",
            "Beams and searches compute every branch, and keep one; they take one opening after "
            "the other, the rest all of them in one batch. Drafts change nothing but the time.",
            f"Restarts: {_BRANCHES} openings of {job.piece} tokens, of which the likeliest is "
            "written on. Step-wise beam and DVTS: the likelier half of four texts goes on after "
            f"every {job.piece} tokens; DVTS keeps one of each subtree. Budget forcing writes the "
            "think tags itself: models that never learned to think gain nothing by it.",
            f"An edit goes over usual samples (openings: {job.edited_count}), and weighs "
            f"candidates at {job.places} doubtful words of each.",
            *failed,
            *unanswered,
        ],
        [head, *(one.row(usual) for one in found)],
    )


def _options(job: _Job, quick: bool) -> dict[str, Callable[[str], Outcome]]:
    """All of them, greedy first: a name, and what writes with it."""
    pieces: dict[str, Any] = {"step": "tokens", "tokens": job.piece}
    found: dict[str, Callable[[str], Outcome]] = {
        "greedy": partial(job.with_options, temperature=0.0),
        _SAMPLING: job.with_options,
        "loop guard": partial(job.with_options, temperature=0.0, guard="loop"),
        "DRY 0.8": partial(job.with_options, temperature=0.0, dry_multiplier=0.8),
        "lookup drafts": partial(job.with_options, temperature=0.0, speculate="lookup"),
        f"beams {_BRANCHES}": job.beams,
        f"best of {_BRANCHES}": partial(job.thought, policy="best-of", n=_BRANCHES),
        "restarts": partial(job.thought, policy="restarts", k=_BRANCHES, tokens=job.piece),
        "step-wise beam": partial(job.thought, policy="beam", keep=2, width=2, **pieces),
        "edit": job.edited,
    }
    if not quick:
        many: dict[str, Any] = {"policy": "best-of", "n": _BRANCHES}
        found[f"best of {_BRANCHES}, the surest"] = partial(job.thought, judge="certainty", **many)
        found["DVTS"] = partial(job.thought, policy="dvts", subtrees=2, width=2, **pieces)
    if job.twin is not None:
        found["edit with the twin"] = partial(job.edited, twin=job.twin)
    return found


def _compared_with(one: Outcome, found: Sequence[Outcome]) -> Outcome:
    """What an option begins with: some choose among usual samples, the others are greedy."""
    return next((other for other in found if one.drawn and other.name == _SAMPLING), found[0])


def _gain(usual: Outcome, other: Outcome) -> Figure:
    """Nats a token by which texts became likelier, opening by opening."""
    pairs = [b - a for a, b in zip(usual.logprobs, other.logprobs, strict=False)]
    return mean_figure(
        f"likelihood, {other.name} − {usual.name}", pairs, "nats/token", why="paired by opening"
    )


def _example(found: Sequence[Outcome]) -> Example | None:
    """The same opening with each option."""
    shown = [(one.name, " ".join(one.shown.split())) for one in found if one.shown]
    text, marks = "", []
    for name, written in shown:
        marks.append(Mark(len(text), len(text) + len(name), "option"))
        text += f"{name}: {written}\n\n"
    caption = "One opening, continued with each option."
    return Example(text.rstrip("\n"), marks, caption) if shown else None
