"""The tree of tokens for users: named branches, each a prompt and the steps after it.

A branch is a list of steps; it holds no pages. What two branches share is found again in the
engine's prefix tree when one of them is resumed.

A watcher of a branch keeps a position in it (`Cursor`) and is only woken: new events follow from
the position. So a slow watcher costs nothing, and one that reconnects receives what it missed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from unspool.engine.generation import Generation
from unspool.engine.results import Step
from unspool.server.http.errors import ApiError, bad_request
from unspool.server.http.replies import to_json
from unspool.session import Session
from unspool.text.tokenizer.stream import TextStream
from unspool.text.tokenizer.tokenizer import Tokenizer

STALE_SECONDS = 6 * 3600.0  # after this long without use, a branch may be evicted
MAX_WEIGHT = 10_000_000  # memory of all branches, in units of about 100 bytes
_UNIT_BYTES = 100
_PER_BRANCH, _PER_STEP, _PER_STAGE = 10, 5, 10


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """The tokens of one message in the prompt, and which of them are its content."""

    role: str
    start: int
    end: int
    content: tuple[int, int] | None  # None: not found, or the opened turn of the model


@dataclass(frozen=True, slots=True, eq=False)
class TreePrompt:
    """The prompt of a branch, shared with its forks."""

    ids: tuple[int, ...]
    text: str
    tokenizer: Tokenizer  # not the model, which may be unloaded
    added: frozenset[int]  # positions of tokens added by the template, or of a BOS token
    messages: list[dict[str, Any]] | None = None
    spans: tuple[MessageSpan, ...] = ()
    stops: tuple[str, ...] = ()  # of the chat format, added to those of requests

    def readable(self, token: int, partial_utf8: bytes = b"") -> str:
        """A token as readable text, after an incomplete UTF-8 character."""
        return self.tokenizer.token_text(token, partial_utf8) if token < len(self.tokenizer) else ""

    def pieces(self) -> Iterator[tuple[str, str]]:
        """For each token: its readable text, and the text that became complete with it."""
        stream = TextStream()
        for token in self.ids:
            partial_utf8 = stream.partial_utf8
            data = self.tokenizer.token_bytes(token) if token < len(self.tokenizer) else b""
            yield self.readable(token, partial_utf8), stream.push(data)

    @property
    def weight(self) -> int:
        """Memory, in units of about 100 bytes."""
        return len(self.ids) + 2 * len(self.text) // _UNIT_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class ExtraSettings:
    """Settings that no sampling stage reads, as the client sent them; forks share the object."""

    values: dict[str, Any] = field(default_factory=dict)
    weight: int = field(init=False)  # memory, in units of about 100 bytes: a grammar may be long

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", len(to_json(self.values)) // _UNIT_BYTES)


def step_weight(step: Step) -> int:
    """Memory of one step, in units of about 100 bytes."""
    return _PER_STEP + len(step.candidates) + _PER_STAGE * len(step.stages)


class StepMemory:
    """Memory of the steps that branches hold. A step in several branches counts once."""

    def __init__(self) -> None:
        self.weight = 0
        self._num_uses: dict[int, int] = {}  # by the step's id(): a branch keeps it alive

    def add(self, steps: Iterable[Step]) -> None:
        for step in steps:
            num_uses = self._num_uses.get(id(step), 0)
            if not num_uses:
                self.weight += step_weight(step)
            self._num_uses[id(step)] = num_uses + 1

    def remove(self, steps: Iterable[Step]) -> None:
        for step in steps:
            num_uses = self._num_uses.pop(id(step)) - 1
            if num_uses:
                self._num_uses[id(step)] = num_uses
            else:
                self.weight -= step_weight(step)


@dataclass(slots=True)
class Cursor:
    """How much of a branch a watcher has received."""

    count: int = 0  # steps
    cuts: int = 0
    state: int = -1
    ends: int = 0


class BranchWriter(Protocol):
    """Generates a branch now; implemented by `BranchWriting`."""

    def stop(self, *branches: TreeBranch) -> None: ...
    async def stopped(self, branch: TreeBranch) -> None: ...
    def set_pace(self, pace: float | None) -> None: ...


@dataclass(eq=False)
class TreeBranch:
    """One branch. Owned by the event loop."""

    model: str
    prompt: TreePrompt
    generation: Generation  # without a source: a branch holds no model
    extra_settings: ExtraSettings  # not in `generation.settings`
    max_tokens: int | None  # of one resume
    owner: str = ""  # the user who created it
    name: str | None = None
    parent_branch: TreeBranch | None = None
    forked_at: int | None = None
    id: str = field(default_factory=lambda: f"branch-{secrets.token_hex(12)}")
    created: float = field(default_factory=time.time)
    touched: float = field(default_factory=time.monotonic)
    finish_reason: str | None = None
    fault: ApiError | None = None  # error that ended the last resume
    last: dict[str, Any] | None = None  # statistics of the last resume
    writing: BranchWriter | None = None
    deleted: bool = False
    cuts: list[tuple[int, str]] = field(default_factory=list)  # (steps that stayed, verb)
    state: int = 0  # grows when anything but the steps changes
    ends: int = 0  # finished resumes
    memory: StepMemory | None = None  # counts its steps; None: not stored
    _locked: bool = False
    _watchers: set[asyncio.Event] = field(default_factory=set)

    @property
    def parent(self) -> str | None:
        """The id of the branch it was forked from."""
        return None if self.parent_branch is None else self.parent_branch.id

    @property
    def steps(self) -> list[Step]:
        return self.generation.steps

    @property
    def tokens(self) -> list[int]:
        """All tokens, prompt included."""
        return [*self.prompt.ids, *self.generation.tokens]

    @property
    def weight(self) -> int:
        """Memory without steps, prompt and settings, which forks share."""
        return _PER_BRANCH + len(self.steps) // 8 + len(self.cuts)

    def step_index(self, at: int | None, name: str) -> int:
        """An index of a step; negative ones count from the end, None is the end."""
        length = len(self.steps)
        if at is None:
            return length
        if not -length <= at <= length:
            raise bad_request(
                f"{name} must be within the {length} steps of the branch, got {at}", name
            )
        return at if at >= 0 else length + at

    def to_generation(self, lm: Session, length: int | None = None) -> Generation:
        """The current text as a generation that the model can resume."""
        common = self.generation.rewind(len(self.steps) if length is None else length)
        return replace(common, source=lm)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the branch: other requests that change it get 409 meanwhile. It may still be
        deleted, so call `check_exists` before you change it."""
        self.check_free()
        self._locked = True
        try:
            yield
        finally:
            self._locked = False

    def check_exists(self) -> None:
        """Raise 404 if the branch was deleted."""
        if self.deleted:
            raise _unknown(self.id)

    def check_free(self) -> None:
        self.check_exists()
        if self._locked or self.writing is not None:
            reason = "running" if self.writing is not None else "being changed"
            raise ApiError(
                409, f"the branch is {reason}; wait, stop it first, or fork it", code="branch_busy"
            )

    def replace_text(self, generation: Generation, common: int, verb: str) -> None:
        """Replace the text; the first `common` steps are the same."""
        if common < len(self.steps):
            self.cuts.append((common, verb))
        request = replace(generation.request, written=())  # it would keep old steps alive
        if self.memory is not None:
            pairs = zip(self.steps, generation.steps, strict=False)
            num_same = next((i for i, (old, new) in enumerate(pairs) if old is not new), None)
            if num_same is None:
                num_same = min(len(self.steps), len(generation.steps))
            self.memory.add(generation.steps[num_same:])
            self.memory.remove(self.steps[num_same:])
        self.generation = replace(generation, source=None, request=request)
        self.finish_reason = self.fault = None
        self.changed()

    def set_text(self, generation: Generation, verb: str) -> int:
        """Replace the text, and return the index of the first step that differs. Raises 404 if the
        branch was deleted while the text was computed."""
        self.check_exists()
        pairs = zip(self.steps, generation.steps, strict=False)
        is_same = [old.token == new.token and old.text == new.text for old, new in pairs]
        common = is_same.index(False) if False in is_same else len(is_same)
        self.replace_text(generation, common, verb)
        return common

    def set_scores(self, first: int, steps: Sequence[Step]) -> bool:
        """Give the steps from `first` on their scores; False if they changed meanwhile."""
        current = self.steps[first : first + len(steps)]
        if self.deleted or self.writing is not None or len(current) < len(steps):
            return False
        if any(
            old.token != new.token or old.is_scored or old.position != new.position
            for old, new in zip(current, steps, strict=True)
        ):
            return False
        scored = [*self.steps[:first], *steps, *self.steps[first + len(steps) :]]
        ending = self.finish_reason, self.fault
        self.replace_text(replace(self.generation, steps=scored), first, "score")
        self.finish_reason, self.fault = ending
        return True

    def add_step(self, step: Step) -> None:
        num_left = len(self.steps) - step.retracts
        if step.retracts:
            self.cuts.append((num_left, "retract"))
        if self.memory is not None:
            self.memory.add([step])
            self.memory.remove(self.steps[num_left:])
        self.generation.append_step(step)

    def changed(self) -> None:
        """Notify watchers of a change other than new steps."""
        self.state += 1
        self.touched = time.monotonic()
        self.wake()

    def ended(self, reason: str, fault: ApiError | None) -> None:
        """Record the end of a resume."""
        self.writing, self.finish_reason, self.fault = None, reason, fault
        self.ends += 1
        self.touched = time.monotonic()
        self.wake()

    def wake(self) -> None:
        for news in self._watchers:
            news.set()

    @contextmanager
    def watched(self, news: asyncio.Event) -> Iterator[None]:
        """Set `news` at every event of the branch."""
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
        self.memory = StepMemory()

    def of_user(self, user: str) -> UserBranches:
        return UserBranches(self, user)

    @property
    def weight(self) -> int:
        """Memory of all branches, in units of about 100 bytes; shared parts count once."""
        shared: dict[int, TreePrompt | ExtraSettings] = {}
        for branch in self.all.values():
            shared[id(branch.prompt)] = branch.prompt
            shared[id(branch.extra_settings)] = branch.extra_settings
        weight = sum(branch.weight for branch in self.all.values())
        return weight + self.memory.weight + sum(part.weight for part in shared.values())

    def make_room(self, count: int = 1) -> None:
        """Make room for `count` more branches, or raise 429. Evicts branches of any user that
        were not used for `STALE_SECONDS`."""
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
            f"no room for {count} more: the server stores {len(self.all)} branches (at most "
            f"{self.limit}) with {self.weight:,} units of memory (at most {MAX_WEIGHT:,}); delete "
            "some of yours",
            code="branches_full",
        )

    def _fits(self, count: int) -> bool:
        return len(self.all) + count <= self.limit and self.weight < MAX_WEIGHT

    def add(self, *branches: TreeBranch) -> None:
        """Store all of these branches, or none (429)."""
        self.make_room(len(branches))
        for branch in branches:
            if self.replica:  # the id names the replica that stores the branch
                branch.id = branch.id.replace("-", f"-{self.replica}-", 1)
            self._repair_parent(branch)
            self.all[branch.id] = branch
            branch.memory = self.memory
            self.memory.add(branch.steps)

    def _repair_parent(self, branch: TreeBranch) -> None:
        """Replace a parent that was deleted before its fork was stored by its own parent."""
        while (parent := branch.parent_branch) is not None and parent.id not in self.all:
            branch.parent_branch = parent.parent_branch
            branch.forked_at = _nearest_fork(parent.forked_at, branch.forked_at)

    def delete(self, branch: TreeBranch) -> None:
        """Delete a branch; its children become those of its parent."""
        if self.all.pop(branch.id, None) is None:
            return
        branch.deleted, branch.memory = True, None
        self.memory.remove(branch.steps)
        for child in self.all.values():
            if child.parent_branch is branch:
                self._repair_parent(child)
                child.changed()
        if branch.writing is not None:
            branch.writing.stop(branch)
        branch.wake()


class UserBranches:
    """The branches of one user."""

    def __init__(self, store: Branches, user: str) -> None:
        self.store, self.user = store, user
        self.make_room, self.delete = store.make_room, store.delete

    def all(self) -> list[TreeBranch]:
        """In the order of creation."""
        return [branch for branch in self.store.all.values() if branch.owner == self.user]

    def get(self, identity: str) -> TreeBranch:
        branch = self.store.all.get(identity)
        if branch is None or branch.owner != self.user:
            raise _unknown(identity)
        branch.touched = time.monotonic()
        return branch

    def add(self, *branches: TreeBranch) -> None:
        for branch in branches:
            branch.owner = self.user
        self.store.add(*branches)


def fork_branch(
    branch: TreeBranch, generation: Generation, at: int, name: str | None = None
) -> TreeBranch:
    """A new branch that shares the first `at` steps; not stored yet."""
    return TreeBranch(
        branch.model,
        branch.prompt,
        replace(generation, source=None),
        branch.extra_settings,
        branch.max_tokens,
        name=name,
        parent_branch=branch,
        forked_at=at,
    )


def _nearest_fork(parent_at: int | None, at: int | None) -> int | None:
    """Steps that a branch shares with its grandparent, once its parent is deleted."""
    return min(parent_at, at) if parent_at is not None and at is not None else parent_at


def _unknown(identity: str) -> ApiError:
    return ApiError(404, f"no such branch: {identity[:60]!r}", code="branch_not_found")
