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
from unspool.text.tokenizer.pieces import readable
from unspool.text.tokenizer.stream import TextStream

_UNIT_BYTES = 100
_PREVIEW, _TITLE = 80, 60  # characters
_PER_BRANCH, _PER_STEP, _PER_STAGE = 10, 5, 10


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A marked step of a branch."""

    at: int  # -1: the prompt
    label: str


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """The tokens of one message in the prompt, and which of them are its content."""

    role: str
    start: int
    end: int
    content: tuple[int, int] | None  # None: not found, or the opened turn of the model


class TokenTexts(Protocol):
    """The texts of tokens: a tokenizer, or the vocabulary that is stored with a text."""

    def __len__(self) -> int: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True, eq=False)
class TreePrompt:
    """The prompt of a branch, shared with its forks."""

    ids: tuple[int, ...]
    text: str
    tokenizer: TokenTexts  # not the model, which may be unloaded
    added: frozenset[int]  # positions of tokens added by the template, or of a BOS token
    messages: list[dict[str, Any]] | None = None
    spans: tuple[MessageSpan, ...] = ()
    stops: tuple[str, ...] = ()  # of the chat format, added to those of requests

    def readable(self, token: int, partial_utf8: bytes = b"") -> str:
        """A token as readable text, after an incomplete UTF-8 character."""
        if token >= len(self.tokenizer):
            return ""
        return readable(self.tokenizer.token_bytes(token), partial_utf8)

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
    progress: tuple[int, int] | None = None  # that was sent


class BranchWriter(Protocol):
    """Generates a branch now; implemented by `BranchWriting`."""

    def stop(self, *branches: TreeBranch) -> None: ...
    async def stopped(self, branch: TreeBranch) -> None: ...
    def set_pace(self, pace: float | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Digest:
    """What lists show of a branch, also while its content is not in memory."""

    length: int
    prompt_tokens: int
    preview: str
    title: str  # first words of the prompt


@dataclass(eq=False)
class TreeBranch:
    """One branch. Owned by the event loop.

    With stored state, its content (prompt, steps, settings) may be on the disk only: then
    `unloaded` is its digest, and `Branches.open` loads it.
    """

    model: str
    prompt: TreePrompt
    generation: Generation  # without a source: a branch holds no model
    extra_settings: ExtraSettings  # not in `generation.settings`
    max_tokens: int | None  # of one resume
    owner: str = ""  # the user who created it
    name: str | None = None
    origin: TreeBranch | None = None  # it was forked from this one, which may be deleted since
    origin_at: int | None = None  # steps that both share
    session: str | None = None  # the id of its session
    bookmarks: tuple[Bookmark, ...] = ()
    id: str = field(default_factory=lambda: f"branch-{secrets.token_hex(12)}")
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    touched: float = field(default_factory=time.monotonic)
    finish_reason: str | None = None
    fault: ApiError | None = None  # error that ended the last resume
    last: dict[str, Any] | None = None  # statistics of the last resume
    writing: BranchWriter | None = None
    prompt_progress: tuple[int, int] | None = None  # tokens computed and their total; a long prompt
    deleted: float | None = None  # when it was deleted
    cuts: list[tuple[int, str]] = field(default_factory=list)  # (steps that stayed, verb)
    state: int = 0  # grows when anything but the steps changes
    ends: int = 0  # finished resumes
    memory: StepMemory | None = None  # counts its steps; None: not stored
    unloaded: Digest | None = None
    number: int | None = None  # its row in the database
    is_detached: bool = False  # its request lacks what depends on the model: grammar, drafter
    source: TreeBranch | None = None  # while it is new: a stored branch with the same first steps
    pins: int = 0  # requests that use it
    num_text_writes: int = 0  # changes of its steps on their way to the database
    _locked: bool = False
    _watchers: set[asyncio.Event] = field(default_factory=set)

    @property
    def is_in_use(self) -> bool:
        """Whether a request or a watcher uses it now."""
        return bool(
            self._locked or self.writing or self._watchers or self.pins or self.num_text_writes
        )

    @property
    def digest(self) -> Digest:
        """What lists show of it."""
        if self.unloaded is not None:
            return self.unloaded
        prompt, first_steps = self.prompt, self.generation.steps[self.forked_at or 0 :][:_PREVIEW]
        questions = [item for item in prompt.messages or () if item.get("role") == "user"]
        text = str(questions[0].get("content") or "") if questions else prompt.text
        preview = "".join(
            step.piece if "\ufffd" in step.text else step.text for step in first_steps
        )
        return Digest(len(self.steps), len(prompt.ids), preview[:_PREVIEW], _first_words(text))

    def unload(self) -> None:
        """Drop the content from memory; it is in the database."""
        self.unloaded = self.digest
        if self.memory is not None:
            self.memory.remove(self.steps)
        nothing: Any = None
        self.prompt = self.generation = self.extra_settings = nothing

    @property
    def parent(self) -> str | None:
        """The id of the nearest branch it was forked from that is not deleted."""
        origin = self.origin
        while origin is not None and origin.deleted is not None:
            origin = origin.origin
        return None if origin is None else origin.id

    @property
    def forked_at(self) -> int | None:
        """Steps that it shares with its parent."""
        origin, at = self.origin, self.origin_at
        while origin is not None and origin.deleted is not None:
            at = _nearest_fork(origin.origin_at, at)
            origin = origin.origin
        return at

    def forget_origin(self, origin: TreeBranch) -> None:
        """Take the origin of a branch that is removed for good, if that was this one's."""
        if self.origin is origin:
            self.origin, self.origin_at = (
                origin.origin,
                _nearest_fork(origin.origin_at, self.origin_at),
            )

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
        if self.deleted is not None:
            raise unknown_branch(self.id)

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
        self.is_detached = self.is_detached and generation.source is None
        self.finish_reason = self.fault = None
        self.changed()

    def num_common(self, steps: Sequence[Step]) -> int:
        """How many of these steps it has already."""
        common = 0
        for old, new in zip(self.steps, steps, strict=False):
            if old is not new and not (
                old.token == new.token
                and old.text == new.text
                and (old.thought, old.chosen) == (new.thought, new.chosen)
            ):
                break
            common += 1
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
        self.touch()
        self.wake()

    def ended(self, reason: str, fault: ApiError | None) -> None:
        """Record the end of a resume."""
        self.writing, self.finish_reason, self.fault = None, reason, fault
        self.prompt_progress = None
        self.ends += 1
        self.touch()
        self.wake()

    def touch(self) -> None:
        """Note that it was changed now."""
        self.touched, self.updated = time.monotonic(), time.time()

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
        origin=branch,
        origin_at=at,
        session=branch.session,
        is_detached=branch.is_detached and generation.source is None,
        source=branch,
    )


def copy_branches(branches: Sequence[TreeBranch], session: str) -> dict[str, TreeBranch]:
    """Copies of branches for another session, by the ids of the originals; not stored yet."""
    copies: dict[str, TreeBranch] = {}
    for branch in branches:
        copy = fork_branch(branch, branch.generation.fork(), 0, branch.name)
        copy.generation.steps = list(branch.steps)
        copy.origin = copy.origin_at = None
        copy.session, copy.bookmarks = session, branch.bookmarks
        copy.finish_reason, copy.last = branch.finish_reason, branch.last
        copies[branch.id] = copy
    for branch in branches:
        if branch.parent in copies:
            copies[branch.id].origin = copies[branch.parent]
            copies[branch.id].origin_at = branch.forked_at
    return copies


def _first_words(text: str) -> str:
    words = " ".join(text[: 10 * _TITLE].split())
    return words if len(words) <= _TITLE else words[: _TITLE - 1].rpartition(" ")[0] + "…"


def _nearest_fork(parent_at: int | None, at: int | None) -> int | None:
    """Steps that a branch shares with its grandparent, once its parent is deleted."""
    return min(parent_at, at) if parent_at is not None and at is not None else parent_at


def unknown_branch(identity: str) -> ApiError:
    return ApiError(404, f"no such branch: {identity[:60]!r}", code="branch_not_found")
