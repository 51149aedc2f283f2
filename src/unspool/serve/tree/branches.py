"""The tree of tokens as people hold it: named branches, each a prompt and the steps behind it.

A branch is only a list of tokens with what was seen at each; it holds no pages. What two branches
share is found again in the engine's tree when one of them goes on.

Whoever watches a branch keeps a place in it (`Cursor`), and is only woken: what is new follows from
the place. So a watcher that reads slowly costs nothing, and one that comes back is told just what
it missed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from unspool.engine.generation import Generation
from unspool.engine.steps import Step
from unspool.serve.http.errors import ApiError, bad_request
from unspool.session import Session
from unspool.text.tokenizer.stream import TextStream
from unspool.text.tokenizer.tokenizer import Tokenizer

STALE_SECONDS = 6 * 3600.0  # untouched for so long, a branch makes room for others
MAX_WATCHERS = 512
MAX_WEIGHT = 10_000_000  # of all branches together, in units of about 100 bytes
_PER_STEP, _PER_STAGE = 4, 10


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """The prompt's tokens of one message, and which of them are its own words."""

    role: str
    start: int
    end: int
    content: tuple[int, int] | None  # None: not found, or the model's turn that is asked for


@dataclass(frozen=True, slots=True, eq=False)
class TreePrompt:
    """What a branch begins with; its forks share it."""

    ids: tuple[int, ...]
    text: str
    tokenizer: Tokenizer  # and not the model, which may be unloaded meanwhile
    added: frozenset[int]  # places whose tokens nobody wrote: the template's, a start token
    messages: list[dict[str, Any]] | None = None
    spans: tuple[MessageSpan, ...] = ()
    stops: tuple[str, ...] = ()  # that the chat format needs, whatever else is asked for

    def readable(self, token: int, begun: bytes = b"") -> str:
        """A token as text, for people, behind what a text ends with (`begun`)."""
        return self.tokenizer.token_text(token, begun) if token < len(self.tokenizer) else ""

    def pieces(self) -> Iterator[tuple[str, str]]:
        """Of each token: itself for people to read, and what can be shown of the text with it."""
        stream = TextStream()
        for token in self.ids:
            begun = stream.half
            data = self.tokenizer.token_bytes(token) if token < len(self.tokenizer) else b""
            yield self.readable(token, begun), stream.push(data)


@dataclass(slots=True)
class Cursor:
    """How much of a branch somebody has been told."""

    count: int = 0  # steps
    cuts: int = 0
    state: int = -1
    ends: int = 0


class Writer(Protocol):
    """Who writes a branch now (`writing.py`)."""

    def stop(self, *branches: TreeBranch) -> None: ...
    async def stopped(self, branch: TreeBranch) -> None: ...
    def set_pace(self, pace: float | None) -> None: ...


@dataclass(eq=False)
class TreeBranch:
    """One branch. All of it changes on the event loop alone."""

    model: str
    prompt: TreePrompt
    generation: Generation  # without its source: a branch keeps no model in memory
    extra_settings: dict[str, Any]  # settings that are not in `generation.settings`, as they came
    max_tokens: int | None  # tokens that one resume writes
    name: str | None = None
    parent: str | None = None
    forked_at: int | None = None
    id: str = field(default_factory=lambda: f"branch-{secrets.token_hex(12)}")
    created: float = field(default_factory=time.time)
    touched: float = field(default_factory=time.monotonic)
    finish_reason: str | None = None
    fault: ApiError | None = None  # what ended the last writing
    last: dict[str, Any] | None = None  # what the last writing took
    writing: Writer | None = None
    deleted: bool = False
    cuts: list[tuple[int, str]] = field(default_factory=list)  # (steps that stayed, by which verb)
    state: int = 0  # grows when anything but the steps changes
    ends: int = 0  # writings that ended
    _locked: bool = False
    _watchers: set[asyncio.Event] = field(default_factory=set)

    @property
    def steps(self) -> list[Step]:
        return self.generation.steps

    @property
    def tokens(self) -> list[int]:
        """The whole text, prompt included."""
        return [*self.prompt.ids, *self.generation.tokens]

    @property
    def weight(self) -> int:
        """What it takes of memory, roughly."""
        shared = self.forked_at or 0  # steps that another branch keeps too
        known = len(self.prompt.ids) if self.parent is None else 0
        if not self.steps:
            return known
        last = self.steps[-1]
        each = _PER_STEP + len(last.candidates) + _PER_STAGE * len(last.stages)
        return known + len(self.steps) // 8 + max(0, len(self.steps) - shared) * each

    def place(self, at: int | None, name: str) -> int:
        """A place among the steps; negative ones count from behind, None is the end."""
        length = len(self.steps)
        if at is None:
            return length
        if not -length <= at <= length:
            raise bad_request(f"{name} is {at}, and the branch has {length} steps", name)
        return at if at >= 0 else length + at

    def to_generation(self, lm: Session, length: int | None = None) -> Generation:
        """What stands here now, as a generation that the model can go on with."""
        common = self.generation.rewind(len(self.steps) if length is None else length)
        return replace(common, source=lm)

    # -- changing ----------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else may change the branch meanwhile."""
        self.check_free()
        self._locked = True
        try:
            yield
        finally:
            self._locked = False

    def check_free(self) -> None:
        if self.deleted:
            raise _unknown(self.id)
        if self._locked or self.writing is not None:
            doing = "being written" if self.writing is not None else "being changed"
            raise ApiError(
                409,
                f"the branch is {doing}; wait, stop it first, or fork it",
                code="branch_busy",
            )

    def replace_text(self, generation: Generation, common: int, verb: str) -> None:
        """Another text in place of this one; the first `kept` steps are the same."""
        if common < len(self.steps):
            self.cuts.append((common, verb))
        request = replace(generation.request, written=())  # which would keep old steps alive
        self.generation = replace(generation, source=None, request=request)
        self.finish_reason = self.fault = None
        self.changed()

    def take(self, step: Step) -> None:
        if step.retracts:
            self.cuts.append((len(self.steps) - step.retracts, "retract"))
        self.generation.take(step)

    def changed(self) -> None:
        """Something but the steps is new."""
        self.state += 1
        self.touched = time.monotonic()
        self.wake()

    def ended(self, reason: str, fault: ApiError | None) -> None:
        """The writing is over."""
        self.writing, self.finish_reason, self.fault = None, reason, fault
        self.ends += 1
        self.touched = time.monotonic()
        self.wake()

    # -- watching ----------------------------------------------------------------------------

    def wake(self) -> None:
        for news in self._watchers:
            news.set()

    @contextmanager
    def watched(self, news: asyncio.Event) -> Iterator[None]:
        """`news` is set whenever something happens here."""
        self._watchers.add(news)
        try:
            yield
        finally:
            self._watchers.discard(news)


class Branches:
    """All branches of one server."""

    def __init__(self, limit: int, replica: str = "") -> None:
        self.limit, self.replica = limit, replica
        self.all: dict[str, TreeBranch] = {}
        self.watchers = 0

    @contextmanager
    def watcher(self) -> Iterator[None]:
        """One who watches branches; so many may."""
        if self.watchers >= MAX_WATCHERS:
            raise ApiError(429, f"{MAX_WATCHERS} watch already, as many as may", retry_after=5)
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1

    def get(self, identity: str) -> TreeBranch:
        branch = self.all.get(identity)
        if branch is None:
            raise _unknown(identity)
        branch.touched = time.monotonic()
        return branch

    def make_room(self, count: int = 1) -> None:
        """For so many more; those that nobody has touched for long go first."""
        if self._fits(count):
            return
        now = time.monotonic()
        for branch in sorted(self.all.values(), key=lambda branch: branch.touched):
            if now - branch.touched < STALE_SECONDS:
                break
            if branch.writing is None:
                self.delete(branch)
            if self._fits(count):
                return
        raise ApiError(
            429,
            f"there is no room for {count} more: {len(self.all)} branches of at most {self.limit} "
            "are kept, or their steps take too much memory; delete some",
            code="branches_full",
        )

    def _fits(self, count: int) -> bool:
        if len(self.all) + count > self.limit:
            return False
        return sum(branch.weight for branch in self.all.values()) < MAX_WEIGHT

    def add(self, branch: TreeBranch) -> TreeBranch:
        self.make_room()
        if self.replica:  # the id says whom to ask for the branch
            branch.id = branch.id.replace("-", f"-{self.replica}-", 1)
        self.all[branch.id] = branch
        return branch

    def fork(
        self, branch: TreeBranch, generation: Generation, at: int, name: str | None = None
    ) -> TreeBranch:
        """A new branch that shares the first `at` steps with this one."""
        forked = TreeBranch(
            branch.model,
            branch.prompt,
            replace(generation, source=None),
            dict(branch.extra_settings),
            branch.max_tokens,
            name=name,
            parent=branch.id if branch.id in self.all else branch.parent,
            forked_at=at,
        )
        return self.add(forked)

    def delete(self, branch: TreeBranch) -> None:
        """Its children become those of its parent, with which they share what it shared."""
        if self.all.pop(branch.id, None) is None:
            return
        branch.deleted = True
        for child in self.all.values():
            if child.parent == branch.id:
                child.parent = branch.parent
                shared = branch.forked_at
                if shared is not None and child.forked_at is not None:
                    shared = min(shared, child.forked_at)
                child.forked_at = shared
                child.changed()
        if branch.writing is not None:
            branch.writing.stop(branch)
        branch.wake()


def _unknown(identity: str) -> ApiError:
    return ApiError(404, f"there is no branch {identity[:60]!r}", code="branch_not_found")
