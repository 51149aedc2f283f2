"""`resume`, `stop` and `events` of `/v1/tree`: generate, and watch."""

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


@router.post("/{identity}/resume", summary="Resume generation")
async def resume(identity: str, body: ResumeRequest, request: Request) -> Response:
    state, branches = state_of(request), branches_of(request)
    branch = branches.get(identity)
    check_choices(body.n, state.settings.max_choices)
    branches.make_room(body.n if body.n > 1 else 0)
    with branch.locked() if body.n == 1 else nullcontext():
        call = await state.enter(request, branch.model, body.n)
        writing, cursors = await _start(call, branches, branch, body)
    if body.stream:
        return _stream_reply(call, writing, cursors)
    return await call.reply(_complete_reply(writing, cursors))


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
    await call.compute(_check_resumable, draft, options.get("stop"))
    targets = [branch]
    if body.n > 1:
        at = len(draft.steps)
        targets = [fork_branch(branch, draft.fork(), at) for _ in range(body.n)]
    cursors = [Cursor(len(new.steps), len(new.cuts), -1, new.ends) for new in targets]
    arrived, metrics = call.request.state.arrived, call.state.metrics
    texts = BranchTexts(call.served, metrics, arrived, [branch.tokens], body.n, options)
    texts.drafts, texts.max_tokens = [draft] * body.n, max_tokens
    call.hold_texts(texts)
    async with asyncio.timeout_at(call.until):
        writing = await call.hold(BranchWriting(texts, targets, body.pace))
    # If either of these raises, the end of the call stops the generation.
    if body.n > 1:
        branches.add(*targets)  # only now: forks that could not start are never visible
    else:
        branch.check_exists()
    for target in targets:
        target.extra_settings = merged_settings(body, target.extra_settings)
        target.max_tokens = target.max_tokens if body.max_tokens is None else body.max_tokens
    return writing, cursors


def _check_resumable(draft: Generation, stop: tuple[str, ...] | None) -> None:
    """Reject a text that has a stop string: it would stop again after one hidden token."""
    stream = TextStream(draft.request.limits.stop if stop is None else stop)
    for step in draft.steps:
        stream.push(step.bytes)
    if stream.matched_stop is not None:
        raise bad_request(
            f"the text has ended at its stop string {stream.matched_stop[:80]!r}; rewind it, or "
            "resume with a different stop",
            "stop",
            "text_ended",
        )


async def _complete_reply(writing: BranchWriting, cursors: list[Cursor]) -> dict[str, Any]:
    await writing.over()
    replies = []
    for number, (branch, before) in enumerate(zip(writing.branches, cursors, strict=True)):
        summary, steps, cuts = writing.results[number]
        since = min([before.count, *(to for to, _ in cuts[before.cuts :])])
        replies.append(
            await in_thread(branch_with_steps, summary, branch.prompt, steps[since:], since)
        )
    return replies[0] if len(replies) == 1 else {"object": "list", "data": replies}


def _stream_reply(call: Call, writing: BranchWriting, cursors: list[Cursor]) -> Response:
    branches = writing.branches

    events = watch(
        list(zip(branches, cursors, strict=True)),
        is_over=lambda: all(branch.writing is not writing for branch in branches),
    )
    return call.stream(writer_from(events), error_event)


@router.post("/{identity}/stop", summary="Stop the running resume")
async def stop(identity: str, request: Request) -> Response:
    branch = branches_of(request).get(identity)
    writing = branch.writing
    if writing is not None:
        writing.stop(branch)
        await writing.stopped(branch)
    return await reply(branch, None)


@router.get("/{identity}/events", summary="Events of a branch, as they happen")
async def events(
    identity: str,
    request: Request,
    since: Annotated[int | None, Query(ge=0, lt=1 << 31)] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    branches, state = branches_of(request), state_of(request)
    branch = branches.get(identity)
    cursor = _cursor_of(branch, since, last_event_id)
    resources: AsyncExitStack = request.state.resources
    await resources.enter_async_context(CancelOnDisconnect(request.receive))
    resources.enter_context(state.watcher())

    async def branch_events() -> AsyncGenerator[bytes, None]:
        is_over = partial(_is_over, branch, state)
        async with aclosing(watch([(branch, cursor)], is_over)) as pieces:
            async for piece in pieces:
                yield piece
        if branch.deleted:
            yield branch_event("delete", branch, {}, cursor)

    return EventStream(writer_from(branch_events()), until=None, failed=error_event)


def _is_over(branch: TreeBranch, state: ServerState) -> bool:
    return branch.deleted or state.admission.is_stopping


def _cursor_of(branch: TreeBranch, since: int | None, last_event_id: str | None) -> Cursor:
    """What a watcher already has: by its last event id, or by `since`."""
    cuts, _, count = (last_event_id or "").partition("-")
    if since is None and cuts.isdecimal() and count.isdecimal() and len(cuts + count) < 20:
        return Cursor(int(count), min(int(cuts), len(branch.cuts)), -1, branch.ends)
    if since is not None and since > len(branch.steps):
        raise bad_request(
            f"since must be at most {len(branch.steps)}, the steps of the branch, got {since}",
            "since",
        )
    return Cursor(since or 0, len(branch.cuts), -1, branch.ends)
