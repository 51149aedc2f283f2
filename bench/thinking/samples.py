"""Whole texts, drawn once for each problem, that serve one sample, best-of-n and all votes.

That is exactly what those policies do: text number i of a seed is the same however many there are,
and which of them wins is a matter of scores alone. Policies that go by pieces cannot be read off
whole texts; they are run (searches.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinking.asking import drawn, prompt_of
from thinking.checks import answer_of, score
from thinking.records import Drawn, Sample, append, drawn_in
from thinking.tasks import Problem
from unspool.decoding.branches import mean_logprob
from unspool.decoding.search.verifiers import CertaintyVerifier
from unspool.engine.generation import Generation
from unspool.lm import LanguageModel


def draw_all(
    lm: LanguageModel,
    problems: Sequence[Problem],
    file: Path,
    *,
    n: int,
    certain: int,
    seed: int,
    at_once: int,
    over: Callable[[], bool],
    tell: Callable[[str], Any],
) -> bool:
    """Samples of all problems, in `file`; those that are there already are not drawn again. False
    if time was over before all were. Of the first `certain` of each the self-certainty is known."""
    known = {one.id for one in drawn_in(file)}
    left = [one for one in problems if one.id not in known]
    width = max(1, at_once // n)
    for begin in range(0, len(left), width):
        if over():
            return False
        some = left[begin : begin + width]
        rows = drawn(lm, some, n, seed)
        greedy = drawn(lm, some, 1, seed, temperature=0.0)
        judged = _certainties(lm, [text for row in rows for text in row[:certain]])
        found = [
            _kept(lm, problem, row, one[0], judged)
            for problem, row, one in zip(some, rows, greedy, strict=True)
        ]
        append(file, found)
        tell(f"{file.stem}: {len(known) + begin + len(some)} of {len(problems)} problems drawn")
    return True


def _certainties(lm: LanguageModel, texts: list[Generation]) -> dict[int, float | None]:
    """Of each text, by its identity."""
    verdicts = CertaintyVerifier(lm).score(texts)
    return {id(text): verdict.score for text, verdict in zip(texts, verdicts, strict=True)}


def _kept(
    lm: LanguageModel,
    problem: Problem,
    texts: Sequence[Generation],
    greedy: Generation,
    certainties: dict[int, float | None],
) -> Drawn:
    def sample(text: Generation) -> Sample:
        found = score(problem, text.text)
        return Sample(
            tokens=len(text.steps),
            logprob=mean_logprob(text) if text.steps else -1e9,
            right=found >= 1.0,
            score=found,
            answer=answer_of(problem, text.text),
            certainty=certainties.get(id(text)),
        )

    return Drawn(
        problem.id,
        len(prompt_of(lm, problem)),
        [sample(text) for text in texts],
        sample(greedy),
        texts[0].text,
    )
