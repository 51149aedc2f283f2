"""`POST /v1/think`: a search for a better text, event by event.

The page draws these events: every text tried, its score, what is pruned, and the tokens spent.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.search.think import (
    ThoughtStream,
    VerifierSpec,
    check_policy,
    default_max_tokens,
    make_verifier,
    policy_options,
    stream_think,
)
from unspool.decoding.search.tree import SearchEvent, Thought
from unspool.decoding.search.verifiers import Verifier
from unspool.engine.generation import Generation
from unspool.engine.results import StepQueue, StepStream
from unspool.server.dialects.chat_prompt import Message, ToolUse, chat_prompt, template_message
from unspool.server.http.errors import bad_request
from unspool.server.http.events import error_event, event, writer_from
from unspool.server.http.replies import new_router
from unspool.server.http.settings import ServerSettings
from unspool.server.runtime.registry import ServedModel
from unspool.server.runtime.schema import Sampling, Seed, StopStrings, Think, Tokens, stops
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.texts import RequestTexts
from unspool.server.runtime.threads import Runner, Worker

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


router = new_router("Thinking")
_NOT_OPTIONS = {"model", "prompt", "messages", "think", "stream", "stop", "stages", "seed"}


class ThinkRequest(Sampling):
    """A prompt or a conversation, and how to search for its continuation."""

    model: str | None = None
    prompt: str | Tokens | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    think: Think = Field(default_factory=lambda: Think.model_validate({}))
    max_tokens: int | None = Field(
        None, ge=1, lt=1 << 31, description="of each text (256; think and compose: the budget)"
    )
    stop: StopStrings | None = None
    seed: Seed | None = None
    stream: bool = False

    def options(self) -> dict[str, Any]:
        """Options of `lm.stream`."""
        options = self.model_dump(exclude_none=True, exclude=_NOT_OPTIONS)
        if self.stages is not None:
            options["stages"] = tuple(self.stages)
        options["seed"] = secrets.randbits(32) if self.seed is None else self.seed
        return {**options, "stop": stops(self.stop)}


@router.post("/v1/think", summary="Search for a better text, with its events")
async def think(body: ThinkRequest, request: Request) -> Response:
    """With `stream`: event `start` has the prompt and the parameters; then `grown`, `judged`,
    `pruned` and `spending` as they happen, `won`, and `done` with the winner and the tokens spent.
    Without it the response has all events under `data`."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    state = state_of(request)
    judge = check_think(body.think, state.settings)
    call = await state.enter(request, body.model, places_of(body.think))
    options = body.options()
    ids, messages = await call.compute(_prompt, call, body, options)
    limit = default_max_tokens(body.think.policy, body.max_tokens)
    options["max_tokens"] = call.token_limit(limit, len(ids), budget_of(body.think, call.settings))
    search = await begin_search(call, body.think, judge, ids, options, messages)
    start = _start(call, body, ids, options["seed"])
    if body.stream:
        return call.stream(writer_from(_events(start, search)), error_event)
    return await call.reply(_complete_reply(start, search))


def _prompt(
    call: Call, body: ThinkRequest, options: dict[str, Any]
) -> tuple[list[int], list[dict[str, Any]] | None]:
    """The prompt as token ids, and the messages of a conversation."""
    if body.messages is None:
        assert body.prompt is not None
        if isinstance(body.prompt, str):
            call.check_text(body.prompt)
        return call.served.lm.prompt_ids(body.prompt), None
    messages = [template_message(message) for message in body.messages]
    call.check_text(*(str(message.get("content", "")) for message in messages))
    return list(chat_prompt(call.served, messages, ToolUse(), options).ids), messages


def _start(call: Call, body: ThinkRequest, ids: list[int], seed: int) -> dict[str, Any]:
    lm = call.served.lm
    return {
        "object": "search",
        "model": call.served.name,
        "prompt": [{"id": token, "text": lm.readable(token)} for token in ids],
        **body.think.model_dump(),
        "budget": budget_of(body.think, call.settings),
        "max_tokens": default_max_tokens(body.think.policy, body.max_tokens),
        "seed": seed,
    }


async def _events(start: dict[str, Any], search: SearchWorker) -> AsyncGenerator[bytes, None]:
    yield event(start, "start")
    async for search_event in search:
        event_json = search_event.to_dict()
        yield event(event_json, event_json["event"])
    yield event(search.stream.result.to_dict(), "done")


async def _complete_reply(start: dict[str, Any], search: SearchWorker) -> dict[str, Any]:
    events = [search_event.to_dict() async for search_event in search]
    return {**start, **search.stream.result.to_dict(), "data": events}
