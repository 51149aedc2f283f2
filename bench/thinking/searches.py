"""Policies that go by pieces, each run by `lm.think` for every problem at equal budgets.

A search gets, problem by problem, as many tokens as the first n samples of that very problem cost,
so that at the same n every policy has had the same budget. Many searches run at the same time, each
on its thread, and the engine writes all their texts in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from thinking.asking import options_of, prompt_of
from thinking.checks import is_right, score
from thinking.records import Drawn, Searched, append, searched_in
from thinking.tasks import Problem
from unspool.decoding.search.verifiers import FunctionVerifier, Verifier
from unspool.errors import UnspoolError
from unspool.lm import LanguageModel

# For models without think tags: how a text begins to think, and how it comes to its answer.
TAGS = ("Let's think step by step.", "So the answer is")


@dataclass(frozen=True)
class Asked:
    """One problem, and what a search for it may cost."""

    problem: Problem
    prompt: list[int]
    n: int
    samples: int  # tokens that the first n samples took

    @property
    def mean(self) -> float:
        return self.samples / self.n

    @property
    def side(self) -> int:
        """The side of a square of n: keep and width of a beam."""
        return max(2, round(self.n**0.5))


Options = Callable[[Asked], dict[str, Any]]


def _pieces(asked: Asked) -> dict[str, Any]:
    return {"step": asked.problem.step, "tokens": asked.problem.piece}


def _restarts(asked: Asked) -> dict[str, Any]:
    """Openings of two pieces; what is not needed for one whole text is spent on them."""
    opening = 2 * asked.problem.piece
    return {"tokens": opening, "k": max(2, int((asked.n - 1) * asked.mean / opening))}


# By name: the policy, its judge ("check": the exact one), and its options.
POLICIES: dict[str, tuple[str, str, Options]] = {
    "beam by log-probability": (
        "beam", "logprob", lambda one: {**_pieces(one), "keep": one.side, "width": one.side}),
    "dvts by log-probability": (
        "dvts", "logprob", lambda one: {**_pieces(one), "subtrees": one.side, "width": one.side}),
    "restarts by log-probability": ("restarts", "logprob", _restarts),
    "mcts by log-probability": (
        "mcts", "logprob", lambda one: {**_pieces(one), "width": one.side}),
    "mcts by the exact check": (
        "mcts", "check", lambda one: {**_pieces(one), "width": one.side}),
    "budget forcing": (
        "think", "logprob", lambda one: {"tags": TAGS, "min_thinking": one.samples // 2,
                                         "max_tokens": one.samples}),
}  # fmt: skip


def fits(policy: str, problems: Sequence[Problem]) -> bool:
    """Whether a policy makes sense for a task: an answer of two tokens has no pieces, and thinking
    is forced where texts reason in words."""
    reasons = problems[0].step == "sentence"
    return reasons if policy == "budget forcing" else reasons or problems[0].max_tokens >= 16


def search_all(
    lm: LanguageModel,
    problems: Sequence[Problem],
    drawn: Sequence[Drawn],
    file: Path,
    *,
    policies: Sequence[str],
    budgets: Sequence[int],
    seed: int,
    at_once: int,
    over: Callable[[], bool],
    tell: Callable[[str], Any],
) -> bool:
    """Searches for all problems, in `file`; False if time was over before all were done."""
    if not problems:
        return True
    samples = {one.id: one for one in drawn}
    done = {(one.id, one.policy, one.n) for one in searched_in(file)}
    with ThreadPoolExecutor(at_once) as threads:
        for n in budgets:
            for policy in (name for name in policies if fits(name, problems)):
                left = [one for one in problems if (one.id, policy, n) not in done]
                search = partial(_searched, lm, policy, seed)
                for begin in range(0, len(left), 2 * at_once):
                    if over():
                        return False
                    some = left[begin : begin + 2 * at_once]
                    asked = [_asked(lm, one, samples[one.id], n) for one in some]
                    append(file, list(threads.map(search, asked)))
                tell(f"{file.stem}: {policy}, {n} samples' worth, {len(problems)} problems")
    return True


def _asked(lm: LanguageModel, problem: Problem, drawn: Drawn, n: int) -> Asked:
    cost = sum(one.tokens for one in drawn.samples[:n])
    return Asked(problem, prompt_of(lm, problem), n, max(cost, n))


def _searched(lm: LanguageModel, name: str, seed: int, asked: Asked) -> Searched:
    problem = asked.problem
    policy, judge, options = POLICIES[name]
    budget = len(asked.prompt) + asked.samples
    given: dict[str, Any] = {**options_of(lm, problem, seed), **options(asked)}
    by: str | Verifier = judge
    if judge == "check":
        by = FunctionVerifier(lambda text: score(problem, text.text), partial=False)
    try:
        thought = lm.think(asked.prompt, policy=policy, judge=by, budget=budget, **given)
    except UnspoolError as error:  # too small a budget for this policy: it has no answer then
        return Searched(problem.id, name, asked.n, budget, asked.samples, False, str(error))
    spent = thought.spent.written + thought.spent.judged
    right = is_right(problem, thought.text)
    return Searched(problem.id, name, asked.n, budget, spent, right, text=thought.text[:200])
