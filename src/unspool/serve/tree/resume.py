"""`resume`, `stop` and `events` of `/v1/tree`: writing, and watching it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, nullcontext
from functools import partial
from typing import Annotated, Any

from fastapi import Header, Query, Request
from starlette.responses import Response

from unspool.engine.generation import Generation
from unspool.serve.core.options import check_choices
from unspool.serve.core.state import Call, ServerState, state_of
from unspool.serve.http.disconnect import CancelOnDisconnect
from unspool.serve.http.errors import bad_request
from unspool.serve.http.events import EventStream, error_event, writer_from
from unspool.serve.http.threads import in_thread
from unspool.serve.tree.branch_json import (
    branch_with_steps,
    branches_of,
    reply,
    router,
)
from unspool.serve.tree.branches import Cursor, TreeBranch, UserBranches, fork_branch
from unspool.serve.tree.prompt import merged_settings
from unspool.serve.tree.schema import DEFAULT_TOKENS, ResumeRequest
from unspool.serve.tree.writing import BranchTexts, BranchWriting, branch_event, watch
from unspool.text.tokenizer.stream import TextStream


@router.post("/{identity}/resume", summary="Go on writing")
async def resume(identity: str, body: ResumeRequest, request: Request) -> Response:
    state, branches = state_of(request), branches_of(request)
    branch = branches.get(identity)
    check_choices(body.n, state.settings.max_choices)
    branches.make_room(body.n if body.n > 1 else 0)
    with branch.locked() if body.n == 1 else nullcontext():
        call = await state.enter(request, branch.model, body.n)
        writing, cursors = await _start(call, branches, branch, body)
    if body.stream:
        return _streamed(call, writing, cursors)
    return await call.reply(_finished(writing, cursors))


async def _start(
    call: Call, branches: UserBranches, branch: TreeBranch, body: ResumeRequest
) -> tuple[BranchWriting, list[Cursor]]:
    options = body.settings()
    if "stop" in options:
        options["stop"] += branch.prompt.stops
    options.setdefault("sample", branch.generation.request.limits.sample)
    draft = branch.to_generation(call.served.lm)
    default = DEFAULT_TOKENS if branch.max_tokens is None else branch.max_tokens
    max_tokens = call.token_limit(body.max_tokens, len(branch.tokens), default)
    await call.thread(_check_goes_on, draft, options.get("stop"))
    targets = [branch]
    if body.n > 1:
        at = len(draft.steps)
        targets = [fork_branch(branch, draft.fork(), at) for _ in range(body.n)]
    cursors = [Cursor(len(each.steps), len(each.cuts), -1, each.ends) for each in targets]
    arrived, metrics = call.request.state.arrived, call.state.metrics
    texts = BranchTexts(call.served, metrics, arrived, [branch.tokens], body.n, options)
    texts.drafts, texts.max_tokens = [draft] * body.n, max_tokens
    call.hold_texts(texts)
    async with asyncio.timeout_at(call.until):
        writing = await call.hold(BranchWriting(texts, targets, body.pace))
    # If either of these raises, the call's end stops the writing.
    if body.n > 1:
        branches.add(*targets)  # only now: what could not begin is never seen by anybody
    else:
        branch.check_exists()
    for each in targets:
        each.extra_settings = merged_settings(body, each.extra_settings)
        each.max_tokens = each.max_tokens if body.max_tokens is None else body.max_tokens
    return writing, cursors


def _check_goes_on(draft: Generation, stop: tuple[str, ...] | None) -> None:
    """A text that holds a stop string would stop again at once, one hidden token further."""
    stream = TextStream(draft.request.limits.stop if stop is None else stop)
    for step in draft.steps:
        stream.push(step.bytes)
    if stream.stopped is not None:
        raise bad_request(
            f"the text has ended at its stop string {stream.stopped[:80]!r}; rewind it, or "
            "resume with another stop",
            "stop",
            "text_ended",
        )


async def _finished(writing: BranchWriting, cursors: list[Cursor]) -> dict[str, Any]:
    await writing.over()
    replies = []
    for number, (branch, before) in enumerate(zip(writing.branches, cursors, strict=True)):
        summary, steps, cuts = writing.results[number]
        since = min([before.count, *(to for to, _ in cuts[before.cuts :])])
        replies.append(
            await in_thread(branch_with_steps, summary, branch.prompt, steps[since:], since)
        )
    return replies[0] if len(replies) == 1 else {"object": "list", "data": replies}


def _streamed(call: Call, writing: BranchWriting, cursors: list[Cursor]) -> Response:
    branches = writing.branches

    events = watch(
        list(zip(branches, cursors, strict=True)),
        is_over=lambda: all(branch.writing is not writing for branch in branches),
    )
    return call.stream(writer_from(events), error_event)


@router.post("/{identity}/stop", summary="Stop the writing that goes on")
async def stop(identity: str, request: Request) -> Response:
    branch = branches_of(request).get(identity)
    writing = branch.writing
    if writing is not None:
        writing.stop(branch)
        await writing.stopped(branch)
    return await reply(branch, None)


@router.get("/{identity}/events", summary="What happens to a branch, as it happens")
async def events(
    identity: str,
    request: Request,
    since: Annotated[int | None, Query(ge=0, lt=1 << 31)] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    branches, state = branches_of(request), state_of(request)
    branch = branches.get(identity)
    cursors = _cursor_of(branch, since, last_event_id)
    resources: AsyncExitStack = request.state.resources
    await resources.enter_async_context(CancelOnDisconnect(request.receive))
    resources.enter_context(state.watcher())

    async def happening() -> AsyncGenerator[bytes, None]:
        over = partial(_is_over, branch, state)
        async with aclosing(watch([(branch, cursors)], over)) as pieces:
            async for piece in pieces:
                yield piece
        if branch.deleted:
            yield branch_event("delete", branch, {}, cursors)

    return EventStream(writer_from(happening()), until=None, failed=error_event)


def _is_over(branch: TreeBranch, state: ServerState) -> bool:
    return branch.deleted or state.admission.refusing


def _cursor_of(branch: TreeBranch, since: int | None, last_event_id: str | None) -> Cursor:
    """What a watcher knows already: by the last event it has read, or as it says itself."""
    cuts, _, count = (last_event_id or "").partition("-")
    if since is None and cuts.isdecimal() and count.isdecimal() and len(cuts + count) < 20:
        return Cursor(int(count), min(int(cuts), len(branch.cuts)), -1, branch.ends)
    if since is not None and since > len(branch.steps):
        raise bad_request(
            f"since is {since}, and the branch has {len(branch.steps)} steps", "since"
        )
    return Cursor(since or 0, len(branch.cuts), -1, branch.ends)
