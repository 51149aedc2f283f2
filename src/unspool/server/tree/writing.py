"""Resume branches, and send their events to watchers.

    async with BranchWriting(texts, branches, pace) as writing:
        await writing.over()                         # or: async for piece in watch(...): send it

The engine generates at full speed; with a pace, steps are added to the branch one by one, and
steps that the engine generated ahead are dropped when the resume is stopped. Nothing is lost: the
same seed generates them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Annotated, Any

from fastapi import Header, Query, Request
from starlette.responses import Response

from unspool.engine.generation import Generation
from unspool.engine.results import Step, StepStream
from unspool.errors import UnspoolError
from unspool.server.http.errors import bad_request, to_api_error
from unspool.server.http.events import EventStream, error_event, event, writer_from
from unspool.server.http.middleware import CancelOnDisconnect
from unspool.server.runtime.schema import check_choices
from unspool.server.runtime.state import Call, ServerState, state_of
from unspool.server.runtime.texts import RequestTexts, step_json
from unspool.server.runtime.threads import in_thread
from unspool.server.tree.branch_json import (
    branch_json,
    branch_with_steps,
    branches_of,
    reply,
    router,
)
from unspool.server.tree.branches import Cursor, TreeBranch, fork_branch
from unspool.server.tree.library import Branches, UserBranches
from unspool.server.tree.parts import attach
from unspool.server.tree.prompt import DEFAULT_TOKENS, ResumeRequest, merged_settings
from unspool.text.tokenizer.stream import TextStream

_POLL_SECONDS = 1.0  # how soon an idle watcher notices that the server stops
_STEPS_PER_PIECE = 32  # of a response
_LONG_PROMPT = 256  # tokens to compute, from which on there is an event for their progress


@dataclass(eq=False)
class BranchTexts(RequestTexts):
    """Texts that continue branches instead of starting from a prompt.

    `options` are the changed settings; `drafts` are the current texts, one for each branch.
    """

    drafts: list[Generation] = field(default_factory=list)
    max_tokens: int = 0  # further tokens of each text
    started: Callable[[int, Generation], Awaitable[None]] | None = None

    def _open_stream(self, number: int) -> tuple[Generation, StepStream]:
        draft = self.drafts[number]
        options = {
            **self.options,
            "sample": self.options["sample"] + number,
            "max_tokens": self.max_tokens,
        }
        return draft.start_resume(**options)

    async def _start(self, number: int) -> None:
        await super()._start(number)
        if self.started is not None:
            await self.started(number, self.texts[number].generation)


class BranchWriting:
    """One resume: of one branch in place, or of several forks."""

    def __init__(
        self,
        texts: BranchTexts,
        branches: Sequence[TreeBranch],
        pace: float | None,
        store: Branches,
        accept: Callable[[], Awaitable[None]] | None = None,
        at_rest: Callable[[TreeBranch], None] = lambda branch: None,
    ) -> None:
        """`accept` is called when the texts have started; if it raises, nothing has changed.
        `at_rest` is called with each branch that has ended."""
        self.texts, self.branches, self.pace = texts, list(branches), pace
        self.store, self._accept, self._at_rest = store, accept, at_rest
        self.fault: BaseException | None = None
        self.results: dict[int, tuple[dict[str, Any], list[Step], list[tuple[int, str]]]] = {}
        """For each branch at the end of the resume: its JSON, steps and cuts. The branch itself
        may have changed again by the time a waiter wakes up."""
        self._began = perf_counter()
        self._first: dict[int, float] = {}  # seconds until a branch's first token
        self._before = [len(branch.tokens) for branch in branches]
        self._inserted = [draft.request.num_inserted for draft in texts.drafts]
        self._pending: list[deque[Step]] = [deque() for _ in branches]
        self._stopped: set[int] = set()
        self._open = set(range(len(branches)))
        self._accepted: set[int] = set()  # the engine has accepted them
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        texts.started = self._started
        texts.watch_progress(self._report_prompt)

    async def __aenter__(self) -> BranchWriting:
        """Start. If this raises, nothing has changed."""
        await self.texts.start()
        if self._accept is not None:
            await self._accept()
        for branch in self.branches:
            branch.writing = self
            branch.changed()
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop, and wait for the end."""
        self.stop()
        with contextlib.suppress(Exception):  # the client has received it
            await self.over()

    def set_pace(self, pace: float | None) -> None:
        self.pace = pace
        self._news.set()

    def stop(self, *branches: TreeBranch) -> None:
        """Stop these branches, or all; their text stays."""
        for number in list(self._open):
            if not branches or self.branches[number] in branches:
                self._stopped.add(number)
        self._news.set()

    async def over(self) -> None:
        """Wait for the end. Raises the error that caused it."""
        assert self._task is not None
        await asyncio.shield(self._task)
        if self.fault is not None:
            raise self.fault

    async def stopped(self, branch: TreeBranch) -> None:
        """Wait until this branch is not running."""
        news = asyncio.Event()
        with branch.watched(news):
            while branch.writing is self:
                news.clear()
                await news.wait()

    def _report_prompt(self, number: int, computed: int) -> None:
        """Called as the text so far is computed, before the first new token."""
        branch = self.branches[number]
        total = self._before[number] + self._inserted[number]
        is_reading = computed < total and number not in self._first
        if is_reading and (branch.prompt_progress or total - computed >= _LONG_PROMPT):
            branch.prompt_progress = computed, total
            branch.wake()

    async def _started(self, number: int, generation: Generation) -> None:
        """Called when the engine has accepted a text, which may change the end of its text."""
        branch = self.branches[number]
        num_same = 0
        for old, new in zip(branch.steps, generation.steps, strict=True):
            if old.text != new.text:
                break
            num_same += 1
        # A copy of the list: new steps of the engine are appended to the other one.
        copy = replace(generation, steps=list(generation.steps))
        await self.store.replace_text(branch, copy, num_same, "rewind", at_rest=False)
        self._accepted.add(number)
        self._news.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        feeding = asyncio.ensure_future(self._feed())
        feeding.add_done_callback(lambda _: self._news.set())
        try:
            while self._open:
                self._news.clear()
                await self._end_stopped()
                handed = await self._distribute(feeding.done())
                if not self._open:
                    break
                if handed and self.pace is not None:
                    due = max(due + 1 / self.pace, loop.time())
                    await self._pause(due)
                else:
                    await self._news.wait()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            self.texts.close()
            for number in list(self._open):  # only if this loop has failed
                self._finish(number, "interrupted")

    async def _feed(self) -> None:
        try:
            await self.texts.deliver(self._add_pending)
        except Exception as error:
            self.fault = error

    def _add_pending(self, steps: list[tuple[int, Step]]) -> None:
        for number, step in steps:
            if number in self._open:
                self._pending[number].append(step)
        self._news.set()

    async def _pause(self, until: float) -> None:
        """Sleep until the next step is due, the pace changes, or a branch is stopped."""
        pace, stopped = self.pace, len(self._stopped)
        await asyncio.sleep(0)  # lets other tasks run, also at the highest pace
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while self.pace == pace and len(self._stopped) == stopped:
                    self._news.clear()
                    await self._news.wait()

    async def _end_stopped(self) -> None:
        for number in self._stopped & self._open:
            text = self.texts.texts.get(number)
            if text is not None:
                with contextlib.suppress(UnspoolError):
                    text.stream.close()
            self._pending[number].clear()
            # Its last step may already be in the branch, before the end of the stream.
            await self._end(number, _last_reason(self.branches[number]) or "interrupted")

    async def _distribute(self, fed: bool) -> bool:
        """Store pending steps and add them to their branches: all, or with a pace one each."""
        news: dict[int, list[Step]] = {}
        for number in sorted(self._open):
            pending = self._pending[number]
            if number not in self._accepted:
                if fed:  # it has failed to start
                    pending.clear()
            elif pending:
                self._first.setdefault(number, perf_counter() - self._began)
                self.branches[number].prompt_progress = None
                count = len(pending) if self.pace is None else 1
                news[number] = [pending.popleft() for _ in range(count)]
        if news:
            try:
                await self.store.add_steps([(self.branches[n], news[n]) for n in news])
            except Exception as error:  # they could not be stored: all texts end here
                self.fault = error
                self._stopped |= self._open
                await self._end_stopped()
                return False
        for number in sorted(self._open & (self._accepted if not fed else self._open)):
            branch, pending = self.branches[number], self._pending[number]
            text = self.texts.texts.get(number)
            if not pending and (fed or (text is not None and text.ended)):
                await self._end(number, self._reason(branch))
            elif number in news:
                branch.wake()
        return bool(news)

    def _reason(self, branch: TreeBranch) -> str:
        last = _last_reason(branch)
        if last is not None:
            return last
        if self.fault is not None:
            return "interrupted"
        limits = branch.generation.request.limits
        return "context" if len(branch.tokens) >= limits.context else "length"

    async def _end(self, number: int, reason: str) -> None:
        """Store the end of a text, and then let its watchers know."""
        branch, last = self.branches[number], self._statistics(number)
        ending = {"finish_reason": reason, "last": last, "updated": time.time()}
        text = self.texts.texts.get(number)
        if text is not None:
            ending |= {"notes": list(text.stream.notes), "reused": text.reused}
        try:
            await self.store.end(branch, ending, lambda: self._finish(number, reason, last))
        except Exception as error:
            self.fault = self.fault or error
            self._finish(number, reason, last)
        self._at_rest(branch)

    def _statistics(self, number: int) -> dict[str, Any]:
        branch, text = self.branches[number], self.texts.texts.get(number)
        return {
            "tokens_before": self._before[number],
            "inserted_tokens": self._inserted[number],
            "reused_tokens": 0 if text is None else text.reused,
            "written_tokens": len(branch.tokens) - self._before[number],
            "stopped_by": None if text is None else text.stream.stopped_by,
            "drafted_tokens": 0 if text is None else text.stream.drafted,
            "accepted_tokens": 0 if text is None else text.stream.accepted,
            "first_token_seconds": self._first.get(number),
            "total_seconds": perf_counter() - self._began,
        }

    def _finish(self, number: int, reason: str, last: dict[str, Any] | None = None) -> None:
        branch, text = self.branches[number], self.texts.texts.get(number)
        self._open.discard(number)
        if text is not None:
            branch.generation.notes = list(text.stream.notes)
            branch.generation.reused = text.reused
        branch.last = self._statistics(number) if last is None else last
        branch.ended(reason, None if self.fault is None else to_api_error(self.fault))
        self.results[number] = (branch_json(branch), list(branch.steps), list(branch.cuts))


def _last_reason(branch: TreeBranch) -> str | None:
    """The finish reason of the last step, or None. Earlier resumes leave none, see
    `Generation.rewind`."""
    return branch.steps[-1].finish_reason if branch.steps else None


def branch_event(name: str, branch: TreeBranch, data: dict[str, Any], cursor: Cursor) -> bytes:
    """One event; its id says how much of the branch its reader has received."""
    mark = f"id: {cursor.cuts}-{cursor.count}\n".encode()
    return mark + event({"branch": branch.id, **data}, name)


def pending_events(branch: TreeBranch, cursor: Cursor) -> bytes:
    """The next events for a cursor; only the first ones if there are many."""
    events: list[bytes] = []
    if cursor.state != branch.state:
        cursor.state = branch.state
        events.append(branch_event("branch", branch, {"data": branch_json(branch)}, cursor))
    if cursor.cuts < len(branch.cuts):
        common, verb = min(branch.cuts[cursor.cuts :])
        cursor.cuts = len(branch.cuts)
        if common < cursor.count:
            num_removed, cursor.count = cursor.count - common, common
            events.append(branch_event(verb, branch, {"to": common, "taken": num_removed}, cursor))
    if branch.prompt_progress not in (None, cursor.progress):
        cursor.progress = branch.prompt_progress
        computed, total = cursor.progress or (0, 0)
        json = {"computed": computed, "total": total}
        events.append(branch_event("prompt", branch, json, cursor))
    for step in branch.steps[cursor.count : cursor.count + _STEPS_PER_PIECE]:
        json = step_json(step, len(branch.prompt.ids), branch.prompt.readable)
        cursor.count += 1
        events.append(branch_event("step", branch, json, cursor))
    if cursor.ends != branch.ends and cursor.count == len(branch.steps):
        cursor.ends = branch.ends
        if branch.fault is not None:
            events.append(branch_event("error", branch, branch.fault.openai(), cursor))
        events.append(branch_event("done", branch, {"data": branch_json(branch)}, cursor))
    return b"".join(events)


async def watch(
    branches: Sequence[tuple[TreeBranch, Cursor]], is_over: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of branches until `is_over` and all of them are sent."""
    news = asyncio.Event()
    with contextlib.ExitStack() as watching:
        for branch, _ in branches:
            watching.enter_context(branch.watched(news))
        while True:
            news.clear()
            over = is_over()
            json = b"".join([pending_events(branch, cursor) for branch, cursor in branches])
            if json:
                yield json
            elif over:
                return
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await news.wait()


# -- `resume`, `stop` and `events` of `/v1/tree`: generate, and watch


@router.post("/{identity}/resume", summary="Resume generation")
async def resume(identity: str, body: ResumeRequest, request: Request) -> Response:
    state, branches = state_of(request), branches_of(request)
    branch = await branches.open(identity)
    check_choices(body.n, state.settings.max_choices)
    branches.make_room(body.n if body.n > 1 else 0, branch)
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
    extra = merged_settings(body, branch.extra_settings)
    copy = branch.generation.fork()
    draft: Generation = await call.compute(attach, branch, copy, call.served.lm, extra.values)
    default = DEFAULT_TOKENS if branch.max_tokens is None else branch.max_tokens
    max_tokens = call.token_limit(body.max_tokens, len(draft.context_tokens()), default)
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

    def save_pages(ended: TreeBranch) -> None:
        def tokens() -> list[int] | None:
            is_at_rest = ended.writing is None and ended.unloaded is None
            return ended.tokens if is_at_rest else None

        call.state.save_pages(call.served.lm, tokens)

    async def accept() -> None:
        if body.n > 1:
            await branches.add(*targets)  # only now: forks that could not start are never visible
        else:
            branch.check_exists()
        for target in targets:
            settings = merged_settings(body, target.extra_settings)
            limit = target.max_tokens if body.max_tokens is None else body.max_tokens
            if settings is not target.extra_settings or limit != target.max_tokens:
                await branches.store.set_settings(target, settings, limit)

    async with asyncio.timeout_at(call.until):
        writing = await call.hold(
            BranchWriting(texts, targets, body.pace, branches.store, accept, save_pages)
        )  # if this raises, the end of the call stops the generation
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
    branch = await branches_of(request).open(identity)
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
    branch = await branches.open(identity)
    cursor = _cursor_of(branch, since, last_event_id)
    resources: AsyncExitStack = request.state.resources
    await resources.enter_async_context(CancelOnDisconnect(request.receive))
    resources.enter_context(state.watcher())

    async def branch_events() -> AsyncGenerator[bytes, None]:
        is_over = partial(_is_over, branch, state)
        async with aclosing(watch([(branch, cursor)], is_over)) as pieces:
            async for piece in pieces:
                yield piece
        if branch.deleted is not None:
            yield branch_event("delete", branch, {}, cursor)

    return EventStream(writer_from(branch_events()), until=None, failed=error_event)


def _is_over(branch: TreeBranch, state: ServerState) -> bool:
    return branch.deleted is not None or state.admission.is_stopping


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
