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
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from unspool.engine.generation import Generation
from unspool.engine.steps import Step
from unspool.engine.stream import StepStream
from unspool.errors import UnspoolError
from unspool.serve.core.step_json import step_json
from unspool.serve.core.texts import RequestTexts
from unspool.serve.http.errors import to_api_error
from unspool.serve.http.events import event
from unspool.serve.tree.branch_json import branch_json
from unspool.serve.tree.branches import Cursor, TreeBranch

_POLL_SECONDS = 1.0  # how soon an idle watcher notices that the server stops
_STEPS_PER_PIECE = 32  # of a response


@dataclass(eq=False)
class BranchTexts(RequestTexts):
    """Texts that continue branches instead of starting from a prompt.

    `options` are the changed settings; `drafts` are the current texts, one for each branch.
    """

    drafts: list[Generation] = field(default_factory=list)
    max_tokens: int = 0  # further tokens of each text
    started: Callable[[int, Generation], None] = lambda number, generation: None

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
        self.started(number, self.texts[number].generation)


class BranchWriting:
    """One resume: of one branch in place, or of several forks."""

    def __init__(
        self, texts: BranchTexts, branches: Sequence[TreeBranch], pace: float | None
    ) -> None:
        self.texts, self.branches, self.pace = texts, list(branches), pace
        self.fault: BaseException | None = None
        self.results: dict[int, tuple[dict[str, Any], list[Step], list[tuple[int, str]]]] = {}
        """For each branch at the end of the resume: its JSON, steps and cuts. The branch itself
        may have changed again by the time a waiter wakes up."""
        self._began = perf_counter()
        self._first: dict[int, float] = {}  # seconds until a branch's first token
        self._before = [len(branch.tokens) for branch in branches]
        self._pending: list[deque[Step]] = [deque() for _ in branches]
        self._stopped: set[int] = set()
        self._open = set(range(len(branches)))
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        texts.started = self._started

    async def __aenter__(self) -> BranchWriting:
        """Start. If this raises, nothing has changed."""
        await self.texts.start()
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

    # -- inside ------------------------------------------------------------------------------

    def _started(self, number: int, generation: Generation) -> None:
        """Called when the engine has accepted a text, which may change the end of its text."""
        branch = self.branches[number]
        num_same = 0
        for old, new in zip(branch.steps, generation.steps, strict=True):
            if old.text != new.text:
                break
            num_same += 1
        # A copy of the list: new steps of the engine are appended to the other one.
        copy = replace(generation, steps=list(generation.steps))
        branch.replace_text(copy, num_same, "rewind")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        feeding = asyncio.ensure_future(self._feed())
        feeding.add_done_callback(lambda _: self._news.set())
        try:
            while self._open:
                self._news.clear()
                self._end_stopped()
                handed = self._distribute(feeding.done())
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
                self._end(number, "interrupted")

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

    def _end_stopped(self) -> None:
        for number in self._stopped & self._open:
            text = self.texts.texts.get(number)
            if text is not None:
                with contextlib.suppress(UnspoolError):
                    text.stream.close()
            self._pending[number].clear()
            # Its last step may already be in the branch, before the end of the stream.
            self._end(number, _last_reason(self.branches[number]) or "interrupted")

    def _distribute(self, fed: bool) -> bool:
        """Add pending steps to their branches: all, or with a pace one each."""
        handed = False
        for number in sorted(self._open):
            branch, pending = self.branches[number], self._pending[number]
            some = bool(pending)
            while pending:
                step = pending.popleft()
                self._first.setdefault(number, perf_counter() - self._began)
                branch.add_step(step)
                if self.pace is not None:
                    break
            text = self.texts.texts.get(number)
            if not pending and (fed or (text is not None and text.ended)):
                self._end(number, self._reason(branch))
            elif some:
                branch.wake()
            handed = handed or some
        return handed

    def _reason(self, branch: TreeBranch) -> str:
        last = _last_reason(branch)
        if last is not None:
            return last
        if self.fault is not None:
            return "interrupted"
        limits = branch.generation.request.limits
        return "context" if len(branch.tokens) >= limits.context else "length"

    def _end(self, number: int, reason: str) -> None:
        branch = self.branches[number]
        self._open.discard(number)
        text = self.texts.texts.get(number)
        if text is not None:
            branch.generation.notes = list(text.stream.notes)
            branch.generation.reused = text.reused
        branch.last = {
            "tokens_before": self._before[number],
            "reused_tokens": 0 if text is None else text.reused,
            "written_tokens": len(branch.tokens) - self._before[number],
            "stopped_by": None if text is None else text.stream.stopped_by,
            "drafted_tokens": 0 if text is None else text.stream.drafted,
            "accepted_tokens": 0 if text is None else text.stream.accepted,
            "first_token_seconds": self._first.get(number),
            "total_seconds": perf_counter() - self._began,
        }
        branch.ended(reason, None if self.fault is None else to_api_error(self.fault))
        self.results[number] = (branch_json(branch), list(branch.steps), list(branch.cuts))


def _last_reason(branch: TreeBranch) -> str | None:
    """The finish reason of the last step, or None. Earlier resumes leave none, see
    `Generation.rewind`."""
    return branch.steps[-1].finish_reason if branch.steps else None


# -- events ------------------------------------------------------------------------------


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
