"""Problems as prompts of a model, and texts written for many of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thinking.tasks import Problem
from unspool.decoding.batch import run_all
from unspool.decoding.branches import HeldBranches
from unspool.engine.generation import Generation
from unspool.lm import LanguageModel

SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.0}


def prompt_of(lm: LanguageModel, problem: Problem) -> list[int]:
    """The conversation by the model's own template; a model without one reads it as plain text."""
    if lm.is_instruct:
        return list(lm.chat_prompt(problem.messages).ids)
    said = [f"{turn['role']}: {turn['content']}" for turn in problem.messages]
    return list(lm.tokenizer.encode("\n\n".join([*said, "assistant:"])))


def options_of(lm: LanguageModel, problem: Problem, seed: int) -> dict[str, Any]:
    """Options of sampling, the same for every policy."""
    stops = list(lm.chat_template.stops) if lm.is_instruct else ["\n\n"]
    return {**SAMPLING, "max_tokens": problem.max_tokens, "seed": seed, "stop": stops}


def drawn(
    lm: LanguageModel, problems: Sequence[Problem], n: int, seed: int, **changes: Any
) -> list[list[Generation]]:
    """`n` texts for each problem, all in one batch; each prompt is read once.

    Text number i of a problem is the one that `lm.think` with this seed writes as number i.
    """
    rows: list[list[Generation]] = []
    for problem in problems:
        options = {**options_of(lm, problem, seed), **changes}
        draft = lm.prepare_generation(prompt_of(lm, problem), **options)
        request = draft.request
        numbered = [replace(request.limits, sample=number) for number in range(n)]
        rows.append(
            [replace(draft, steps=[], request=replace(request, limits=one)) for one in numbered]
        )
    with HeldBranches(lm.engine, lm.adapter) as held:
        reading = [(held.open(row[0].prompt[:-1]), ()) for row in rows]
        for begin in range(0, len(reading), 32):
            lm.engine.extend_all(reading[begin : begin + 32])
        run_all(lm, [text for row in rows for text in row], patient=False)
    return rows
