"""Search for a better answer on behalf of a request: its limits, start and end.

Disconnecting stops the search: running texts are cancelled, and its resources are released.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unspool.decoding.think.events import SearchEvent
from unspool.decoding.think.judge import Verifier
from unspool.decoding.think.judges.names import VerifierSpec, make_verifier
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
from unspool.serve.core.texts import RequestTexts
from unspool.serve.http.errors import bad_request
from unspool.serve.http.settings import ServerSettings
from unspool.serve.http.threads import Runner, Worker

# Options of policies whose product is the number of parallel texts.
_WIDTHS = ("n", "width", "keep", "k", "subtrees")
_DEFAULT_BUDGET = 2000
Messages = Sequence[Mapping[str, Any]]


def check_think(think: Think, settings: ServerSettings) -> VerifierSpec | None:
    """Reject what this server does not allow, before the request queues."""
    options = think.policy_options()
    check_policy(think.policy, options)
    if (think.budget or 0) > settings.max_think:
        raise bad_request(
            f"budget must be at most {settings.max_think:,} tokens on this server, got "
            f"{think.budget:,}",
            "budget",
        )
    if places_of(think) > settings.max_choices:
        raise bad_request(
            f"the policy would run {places_of(think)} texts in parallel "
            f"({' times '.join(_widths(think))}); this server allows at most "
            f"{settings.max_choices}",
            "think",
        )
    if "extract" in options:
        raise bad_request("give the pattern of a vote as its judge: vote:PATTERN", "extract")
    judge = None if think.judge is None else VerifierSpec.parse(think.judge)
    if judge is not None and judge.runs_code:
        raise bad_request(
            "judges that run files (python:, tests:) are not available over HTTP; use "
            "unspool think or lm.think on the machine itself",
            "judge",
            "judge_not_allowed",
        )
    return judge


def budget_of(think: Think, settings: ServerSettings) -> int:
    """The number of tokens it may compute."""
    return think.budget or min(_DEFAULT_BUDGET, settings.max_think)


def places_of(think: Think) -> int:
    """The number of texts it runs in parallel."""
    return math.prod(max(1, width) for width in _widths(think).values())


def _widths(think: Think) -> dict[str, int]:
    """The widths of the request, or the defaults of the policy."""
    options = {**policy_options(think.policy), **think.policy_options()}
    return {name: options[name] for name in _WIDTHS if isinstance(options.get(name), int)}


class SearchWorker(Worker[SearchEvent]):
    """The events of a search that runs on threads. Exiting stops the search and waits for it."""

    def __init__(self, stream: ThoughtStream, run: Runner) -> None:
        super().__init__(stream, run)
        self.stream = stream

    async def __aexit__(self, *error: object) -> None:
        self.stream.cancel()
        await super().__aexit__(*error)


async def begin_search(
    call: Call,
    think: Think,
    judge: VerifierSpec | None,
    ids: list[int],
    options: dict[str, Any],
    messages: Messages | None,
) -> SearchWorker:
    """Check the options and prepare the search; nothing is computed yet. A judge that is a model
    must be one of this server."""
    call.check_prompt(len(ids))
    other: ServedModel | None = None
    if judge is not None and judge.model is not None:
        other = await call.hold_model(judge.model)

    def open_stream() -> ThoughtStream:
        lm = call.served.lm
        verifier: Verifier | None = None
        if judge is not None:
            verifier = make_verifier(
                lm, judge, conversation=messages, load=lambda _: other.lm if other else lm
            )
        return stream_think(
            lm,
            ids,
            policy=think.policy,
            judge=verifier,
            budget=budget_of(think, call.settings),
            **think.policy_options(),
            **options,
        )

    return await call.hold(SearchWorker(await call.compute(open_stream), call.run))


@dataclass(eq=False)
class SearchTexts(RequestTexts):
    """The winner of a search as a text whose steps are all available when it starts."""

    stream: ThoughtStream | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def result(self) -> Thought | None:
        return self.stream.result if self.stream is not None and self.stream.is_finished else None

    def _open_stream(self, number: int) -> tuple[Generation, StepStream]:
        assert self.result is not None
        best, queue = self.result.best, StepQueue()
        for place, step in enumerate(best.steps, 1):
            last = place == len(best.steps)  # also if the budget cut it off
            reason = (step.finish_reason or "length") if last else None
            queue.add(replace(step, finish_reason=reason))
        queue.end()
        return replace(best, steps=[], empty_reason=best.empty_reason or "length"), StepStream(
            queue
        )

    def usage(self) -> dict[str, Any]:
        """Counts all computed tokens; those that are not in the winner are reasoning tokens."""
        usage = super().usage()
        if self.stream is None:
            return usage
        spent, visible = self.stream.spent, usage["completion_tokens"]
        computed = max(visible, spent.written + spent.judged)
        usage["completion_tokens"] = computed
        usage["total_tokens"] = usage["prompt_tokens"] + computed
        usage["completion_tokens_details"]["reasoning_tokens"] = computed - visible
        cached = max(0, usage["prompt_tokens"] - 1 - spent.prompt)
        usage["prompt_tokens_details"]["cached_tokens"] = cached
        return usage
