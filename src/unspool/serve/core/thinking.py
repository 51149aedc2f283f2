"""A search for an answer on behalf of a request: what it may ask for, and how it is ended.

Whoever hangs up ends it: the texts that are being written stop at once, and everything that the
search holds is given back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unspool.decoding.think.events import Event
from unspool.decoding.think.judge import Judge
from unspool.decoding.think.judges.names import JudgeName, judge_named
from unspool.decoding.think.think import (
    ThoughtStream,
    check_policy,
    policy_options,
    stream_think,
)
from unspool.decoding.think.thought import Thought
from unspool.engine.generation import Generation
from unspool.engine.stream import StepQueue, StepStream
from unspool.serve.core.registry import ServedModel
from unspool.serve.core.schema import Think
from unspool.serve.core.state import Call
from unspool.serve.core.texts import Texts
from unspool.serve.http.errors import bad_request
from unspool.serve.http.settings import ServeSettings
from unspool.serve.http.threads import Runner, Worker

# Options of policies that say how many texts are written side by side, one times the other.
_WIDTHS = ("n", "width", "keep", "k", "subtrees")
_USUAL_BUDGET = 2000
Messages = Sequence[Mapping[str, Any]]


def check_think(wanted: Think, settings: ServeSettings) -> JudgeName | None:
    """Refuse what this server does not do, before a request waits for its turn."""
    options = wanted.policy_options()
    check_policy(wanted.policy, options)
    if (wanted.budget or 0) > settings.max_think:
        raise bad_request(
            f"budget is {wanted.budget:,}; this server lets a search compute at most "
            f"{settings.max_think:,} tokens",
            "budget",
        )
    if places_of(wanted) > settings.max_choices:
        raise bad_request(
            f"the policy would write {places_of(wanted)} texts at once "
            f"({' times '.join(_widths(wanted))}); this server allows at most "
            f"{settings.max_choices}",
            "think",
        )
    if "extract" in options:
        raise bad_request("give the pattern of a vote as its judge: vote:PATTERN", "extract")
    judge = None if wanted.judge is None else JudgeName.parse(wanted.judge)
    if judge is not None and judge.runs_code:
        raise bad_request(
            "judges that run files (python:, tests:) cannot be asked for over HTTP; use "
            "unspool think or lm.think on the machine itself",
            "judge",
            "judge_not_allowed",
        )
    return judge


def budget_of(wanted: Think, settings: ServeSettings) -> int:
    """How many tokens it may compute."""
    return wanted.budget or min(_USUAL_BUDGET, settings.max_think)


def places_of(wanted: Think) -> int:
    """How many texts it will write at once."""
    return math.prod(max(1, width) for width in _widths(wanted).values())


def _widths(wanted: Think) -> dict[str, int]:
    """What was given, or is usual for the policy."""
    known = {**policy_options(wanted.policy), **wanted.policy_options()}
    return {name: known[name] for name in _WIDTHS if isinstance(known.get(name), int)}


class Searching(Worker[Event]):
    """The events of a search, made on a thread. Who leaves ends the search, and waits for that."""

    def __init__(self, stream: ThoughtStream, run: Runner) -> None:
        super().__init__(stream, run)
        self.stream = stream

    async def __aexit__(self, *error: object) -> None:
        self.stream.cancel()
        await super().__aexit__(*error)


async def begin_search(
    call: Call,
    wanted: Think,
    judge: JudgeName | None,
    ids: list[int],
    options: dict[str, Any],
    asked: Messages | None,
) -> Searching:
    """The search, all of it checked; nothing is computed yet. Judges that are models are among
    those that this server has."""
    call.check_prompt(len(ids))
    other: ServedModel | None = None
    if judge is not None and judge.model is not None:
        other = await call.hold_model(judge.model)

    def begun() -> ThoughtStream:
        lm = call.served.lm
        found: Judge | None = None
        if judge is not None:
            found = judge_named(
                lm, judge, conversation=asked, load=lambda _: other.lm if other else lm
            )
        return stream_think(
            lm,
            ids,
            policy=wanted.policy,
            judge=found,
            budget=budget_of(wanted, call.settings),
            **wanted.policy_options(),
            **options,
        )

    return await call.hold(Searching(await call.thread(begun), call.run))


@dataclass(eq=False)
class ThoughtTexts(Texts):
    """The winner of a search as a text like any other, written all at once when it is found."""

    stream: ThoughtStream | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def thought(self) -> Thought | None:
        return self.stream.result if self.stream is not None and self.stream.is_over else None

    def _open_stream(self, number: int) -> tuple[Generation, StepStream]:
        assert self.thought is not None
        best, queue = self.thought.best, StepQueue()
        for place, step in enumerate(best.steps, 1):
            last = place == len(best.steps)  # one that the budget cut short has ended too
            reason = (step.finish_reason or "length") if last else None
            queue.put(replace(step, finish_reason=reason))
        queue.end()
        return replace(best, steps=[], empty_reason=best.empty_reason or "length"), StepStream(
            queue
        )

    def usage(self) -> dict[str, Any]:
        """All that was computed is part of the answer; what is not in the winner is reasoning."""
        found = super().usage()
        if self.stream is None:
            return found
        spent, shown = self.stream.spent, found["completion_tokens"]
        computed = max(shown, spent.written + spent.judged)
        found["completion_tokens"] = computed
        found["total_tokens"] = found["prompt_tokens"] + computed
        found["completion_tokens_details"]["reasoning_tokens"] = computed - shown
        cached = max(0, found["prompt_tokens"] - 1 - spent.prompt)
        found["prompt_tokens_details"]["cached_tokens"] = cached
        return found
