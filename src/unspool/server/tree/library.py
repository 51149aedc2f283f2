"""All branches and sessions of a server: in memory, and with stored state also in a database.

A change is stored first and then made in memory, so a client never sees what could be lost. It goes
on if its client leaves meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from unspool.engine.generation import Generation
from unspool.engine.results import Step
from unspool.server.http.errors import ApiError
from unspool.server.runtime.threads import in_thread
from unspool.server.tree.branches import (
    Bookmark,
    ExtraSettings,
    StepMemory,
    TreeBranch,
    TreePrompt,
    unknown_branch,
)
from unspool.server.tree.storage import Job, TreeStorage

DELETED_SECONDS = 24 * 3600.0  # this long, a deleted branch or session can be restored
MAX_DELETED = 256  # branches that can be restored, without stored state
MAX_WEIGHT = 10_000_000  # memory of all branches, in units of about 100 bytes
MAX_SESSIONS = 100_000  # of one user
MAX_VIEW_BYTES = 64 << 20  # of all views in memory, without stored state
_MAX_EVICTED = 10_000  # ids whose eviction is remembered
Result = TypeVar("Result")


@dataclass(eq=False)
class TreeSession:
    """A text that a person works on: branches, with a title, tags and the view of the page."""

    owner: str
    title: str | None = None  # None: the first words of its first prompt
    tags: tuple[str, ...] = ()
    view: bytes | None = b"{}"  # JSON, opaque; None: it is in the database
    id: str = field(default_factory=lambda: f"session-{secrets.token_hex(12)}")
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    deleted: float | None = None

    def row(self) -> dict[str, Any]:
        """Its columns in the database, without the view."""
        return {
            "id": self.id,
            "owner": self.owner,
            "created": self.created,
            "updated": self.updated,
            "deleted": self.deleted,
            "title": self.title,
            "tags": "\n".join(self.tags),
        }


class Branches:
    """All branches and sessions of one server. Owned by the event loop."""

    def __init__(self, limit: int, replica: str = "", storage: TreeStorage | None = None) -> None:
        self.limit, self.replica, self.storage = limit, replica, storage
        self.all: dict[str, TreeBranch] = {}
        self.loaded: dict[str, TreeBranch] = {}  # of these, those whose content is in memory
        self.deleted: dict[str, TreeBranch] = {}  # can be restored; the first deleted first
        self.sessions: dict[str, TreeSession] = {}
        self.memory = StepMemory()
        self._evicted: OrderedDict[str, str] = OrderedDict()  # ids and owners of the last ones
        self._loading: dict[str, asyncio.Task[None]] = {}
        if storage is not None:
            for branch in storage.read_branches():
                (self.all if branch.deleted is None else self.deleted)[branch.id] = branch
            for row in storage.read_sessions():
                session = TreeSession(**row, view=None)
                self.sessions[session.id] = session

    @property
    def is_saved(self) -> bool:
        """Whether texts are there after a restart."""
        return self.storage is not None and not self.storage.database.is_readonly

    def of_user(self, user: str, resources: AsyncExitStack | None = None) -> UserBranches:
        return UserBranches(self, user, resources)

    # -- storing ---------------------------------------------------------------------------------

    async def write(
        self, job: Job | None, apply: Callable[[], Result], *branches: TreeBranch
    ) -> Result:
        """Store a change, then make it in memory; also if the request is cancelled meanwhile.

        Args:
            job: What to store; run only with stored state.
            apply: Makes the change in memory.
            branches: Those whose steps change.
        """
        if self.storage is None or job is None:
            return apply()
        storage = self.storage

        async def run() -> Result:
            try:
                await storage.run(job)
            finally:
                for branch in branches:
                    branch.num_text_writes -= 1
            return apply()

        for branch in branches:
            branch.num_text_writes += 1
        return await asyncio.shield(asyncio.ensure_future(run()))

    async def add(self, *branches: TreeBranch) -> None:
        """Store all of these branches, or none (429)."""
        self.make_room(len(branches), *(branch.origin for branch in branches))
        self.name(*branches)
        job = None if self.storage is None else self.storage.insertion(branches)
        await self.write(job, lambda: self._add(branches), *branches)

    def name(self, *branches: TreeBranch) -> None:
        """Put the replica that stores them into the ids of new branches."""
        for branch in branches:
            if self.replica and self.replica not in branch.id.split("-")[1:-1]:
                branch.id = branch.id.replace("-", f"-{self.replica}-", 1)

    def _add(self, branches: Sequence[TreeBranch]) -> None:
        for branch in branches:
            while branch.origin is not None and not self._knows(branch.origin):
                branch.forget_origin(branch.origin)  # it was removed meanwhile
            branch.source = None
            self.all[branch.id] = self.loaded[branch.id] = branch
            branch.memory = self.memory
            self.memory.add(branch.steps)

    async def replace_text(
        self,
        branch: TreeBranch,
        generation: Generation,
        common: int,
        verb: str,
        *,
        prompt: TreePrompt | None = None,
        at_rest: bool = True,
    ) -> None:
        """Replace the text of a branch; watchers learn that `common` steps stay."""
        branch.check_exists()
        updated = time.time()

        def apply() -> None:
            branch.check_exists()
            branch.prompt = prompt or branch.prompt
            branch.replace_text(generation, common, verb)
            branch.updated = updated

        job = None
        if self.storage is not None and branch.number is not None:
            job = self.storage.replacement(branch, generation, updated, prompt)
        await self.write(job, apply, branch)
        if at_rest:
            self._came_to_rest(branch)

    async def set_text(self, branch: TreeBranch, generation: Generation, verb: str) -> int:
        """Replace the text, and return the index of the first step that differs. Raises 404 if the
        branch was deleted while the text was computed."""
        branch.check_exists()
        common = branch.num_common(generation.steps)
        await self.replace_text(branch, generation, common, verb)
        return common

    async def add_steps(self, news: Sequence[tuple[TreeBranch, Sequence[Step]]]) -> None:
        """Append generated steps to branches, all of them in one transaction."""

        def apply() -> None:
            for branch, steps in news:
                for step in steps:
                    branch.add_step(step)

        job = None if self.storage is None else self.storage.addition(news)
        await self.write(job, apply, *(branch for branch, _ in news))

    async def end(
        self, branch: TreeBranch, last: dict[str, Any], apply: Callable[[], None]
    ) -> None:
        """Store the end of a resume, then apply it."""
        job = None
        if self.storage is not None and branch.deleted is None:
            job = self.storage.ending(branch, last)
        await self.write(job, apply)
        branch.updated = last["updated"]
        self._came_to_rest(branch)

    def _came_to_rest(self, branch: TreeBranch) -> None:
        """Tidy up what is stored of a branch; nothing waits for it."""
        if self.storage is not None and branch.number is not None and branch.writing is None:
            self.storage.tidy(branch)

    async def update(
        self,
        branch: TreeBranch,
        *,
        name: str | None,
        bookmarks: tuple[Bookmark, ...],
        session: str | None,
    ) -> None:
        updated = time.time()

        def apply() -> None:
            branch.name, branch.bookmarks, branch.session = name, bookmarks, session
            branch.changed()
            branch.updated = updated

        job = None
        if self.storage is not None:
            job = self.storage.labels(branch, name, bookmarks, session, updated)
        await self.write(job, apply)

    async def set_settings(
        self, branch: TreeBranch, settings: ExtraSettings, max_tokens: int | None
    ) -> None:
        def apply() -> None:
            branch.extra_settings, branch.max_tokens = settings, max_tokens

        job = None
        if self.storage is not None:
            job = self.storage.settings(branch, settings, max_tokens)
        await self.write(job, apply)

    # -- room ------------------------------------------------------------------------------------

    @property
    def weight(self) -> int:
        """Memory of all branches, in units of about 100 bytes; shared parts count once."""
        shared: dict[int, TreePrompt | ExtraSettings] = {}
        for branch in self.loaded.values():
            shared[id(branch.prompt)] = branch.prompt
            shared[id(branch.extra_settings)] = branch.extra_settings
        weight = sum(branch.weight for branch in self.loaded.values())
        return weight + self.memory.weight + sum(part.weight for part in shared.values())

    def make_room(self, count: int = 1, *keep: TreeBranch | None) -> None:
        """Make room for `count` more branches, or raise 429.

        With stored state, branches that were not used for the longest time leave the memory.
        Without, they are removed, of the user who has the most. None of `keep`, and none in use.
        """
        while not self._fits(count):
            unused = [
                branch
                for branch in self.loaded.values()
                if not branch.is_in_use and branch not in keep
            ]
            if not unused or count > self.limit:
                raise ApiError(
                    429,
                    f"no room for {count} more: the server has {len(self.loaded)} branches in "
                    f"memory (at most {self.limit}) with {self.weight:,} units of memory (at most "
                    f"{MAX_WEIGHT:,}), all of them in use; stop or delete some of yours",
                    code="branches_full",
                )
            if self.storage is not None:
                branch = min(unused, key=lambda item: item.touched)
                del self.loaded[branch.id]
                branch.unload()
            else:
                self._evict(unused)

    def _evict(self, unused: Sequence[TreeBranch]) -> None:
        num_owned = Counter(branch.owner for branch in unused)
        branch = min(unused, key=lambda item: (-num_owned[item.owner], item.touched))
        self._remove(branch)
        branch.deleted = time.time()
        self._forget(branch)
        self._evicted[branch.id] = branch.owner
        if len(self._evicted) > _MAX_EVICTED:
            self._evicted.popitem(last=False)
        branch.wake()

    def check_evicted(self, identity: str, user: str) -> None:
        """Raise 404 with the reason if the branch had to make room for others."""
        if self._evicted.get(identity) == user:
            raise ApiError(
                404,
                f"branch {identity!r} was removed to make room: this server keeps at most "
                f"{self.limit} branches; unspool serve --state DIR keeps all of them",
                code="branch_evicted",
            )

    def _fits(self, count: int) -> bool:
        return len(self.loaded) + count <= self.limit and self.weight < MAX_WEIGHT

    async def load(self, branch: TreeBranch) -> None:
        """Read the content of a branch from the database, if it is not in memory."""
        while branch.unloaded is not None:
            task = self._loading.get(branch.id)
            if task is None:
                task = self._loading[branch.id] = asyncio.ensure_future(self._load(branch))
                task.add_done_callback(lambda _: self._loading.pop(branch.id, None))
            await asyncio.shield(task)

    async def _load(self, branch: TreeBranch) -> None:
        assert self.storage is not None
        self.make_room(1, branch)
        content = await self.storage.run(self.storage.reading(branch))
        parts = await in_thread(content.decode)
        branch.prompt, branch.generation, branch.extra_settings = parts
        branch.unloaded, branch.is_detached = None, True
        if branch.id in self.all:
            self.loaded[branch.id] = branch
            branch.memory = self.memory
            self.memory.add(branch.steps)

    # -- deleting --------------------------------------------------------------------------------

    async def delete(self, branch: TreeBranch, when: float | None = None) -> None:
        """Delete a branch; its children become those of its parent, until it is restored."""
        when = time.time() if when is None else when
        job = None if self.storage is None else self.storage.deletion([branch.id], when)
        await self.write(job, lambda: self._delete(branch, when))

    def _delete(self, branch: TreeBranch, when: float) -> None:
        if self._remove(branch):
            branch.deleted = when
            self.deleted[branch.id] = branch
            while self.storage is None and len(self.deleted) > MAX_DELETED:
                self._forget(next(iter(self.deleted.values())))
            self._tell_children(branch)
            branch.wake()

    async def restore(self, branch: TreeBranch) -> None:
        """Bring back a deleted branch."""
        self.make_room(1, branch)
        job = None if self.storage is None else self.storage.deletion([branch.id], None)
        await self.write(job, lambda: self._restore(branch))

    def _restore(self, branch: TreeBranch) -> None:
        if self.deleted.pop(branch.id, None) is not None:
            branch.deleted = None
            self.all[branch.id] = branch
            if branch.unloaded is None:
                self.loaded[branch.id] = branch
                branch.memory = self.memory
                self.memory.add(branch.steps)
            branch.changed()
            self._tell_children(branch)

    def purge(self) -> None:
        """Remove for good what was deleted more than `DELETED_SECONDS` ago."""
        before = time.time() - DELETED_SECONDS
        for branch in [item for item in self.deleted.values() if (item.deleted or 0) < before]:
            self._forget(branch)
        for session in list(self.sessions.values()):
            if session.deleted is not None and session.deleted < before:
                del self.sessions[session.id]
                if self.storage is not None:
                    self.storage.forget_session(session.id)

    def _remove(self, branch: TreeBranch) -> bool:
        """Take a branch out of the tree; False if it is not in it."""
        if self.all.pop(branch.id, None) is None:
            return False
        if self.loaded.pop(branch.id, None) is not None:
            branch.memory = None
            self.memory.remove(branch.steps)
        if branch.writing is not None:
            branch.writing.stop(branch)
        return True

    def _knows(self, branch: TreeBranch) -> bool:
        return branch.id in self.all or branch.id in self.deleted

    def _forget(self, branch: TreeBranch) -> None:
        """Remove a branch for good."""
        self.deleted.pop(branch.id, None)
        children = [
            other
            for other in (*self.all.values(), *self.deleted.values())
            if other.origin is branch
        ]
        for child in children:
            child.forget_origin(branch)
            child.changed()
        if self.storage is not None:
            self.storage.forget(branch, children)

    def _tell_children(self, branch: TreeBranch) -> None:
        """Notify the watchers of branches whose parent has changed."""
        for child in self.all.values():
            if child.origin is branch:
                child.state += 1
                child.wake()


class UserBranches:
    """The branches and sessions of one user."""

    def __init__(self, store: Branches, user: str, resources: AsyncExitStack | None = None) -> None:
        """`resources` are those of a request: until they are released, branches it opens stay in
        memory."""
        self.store, self.user, self._resources = store, user, resources
        self.make_room, self.delete = store.make_room, store.delete

    def all(self) -> list[TreeBranch]:
        """In the order of creation."""
        return [branch for branch in self.store.all.values() if branch.owner == self.user]

    def get(self, identity: str) -> TreeBranch:
        """A branch, perhaps without its content."""
        branch = self.store.all.get(identity)
        if branch is None or branch.owner != self.user:
            self.store.check_evicted(identity, self.user)
            raise unknown_branch(identity)
        branch.touched = time.monotonic()
        return branch

    async def open(self, identity: str) -> TreeBranch:
        """A branch with its content, which stays in memory until the request is over."""
        branch = self.get(identity)
        if self._resources is not None:
            branch.pins += 1
            self._resources.callback(_unpin, branch)
        await self.store.load(branch)
        branch.check_exists()
        return branch

    async def restore(self, identity: str) -> TreeBranch:
        """Bring back a deleted branch; one that is not deleted stays as it is."""
        self.store.purge()
        branch = self.store.deleted.get(identity)
        if branch is not None and branch.owner == self.user:
            await self.store.restore(branch)
        return await self.open(identity)

    async def add(self, *branches: TreeBranch) -> None:
        for branch in branches:
            branch.owner = self.user
        await self.store.add(*branches)

    # -- sessions --------------------------------------------------------------------------------

    def sessions(self) -> list[TreeSession]:
        """In the order of creation."""
        self.store.purge()
        return [
            session
            for session in self.store.sessions.values()
            if session.owner == self.user and session.deleted is None
        ]

    def session(self, identity: str, *, deleted: bool = False) -> TreeSession:
        session = self.store.sessions.get(identity)
        if (
            session is None
            or session.owner != self.user
            or (session.deleted is not None and not deleted)
        ):
            raise ApiError(404, f"no such session: {identity[:60]!r}", code="session_not_found")
        return session

    def in_session(self, session: TreeSession) -> list[TreeBranch]:
        return [branch for branch in self.all() if branch.session == session.id]

    async def view(self, session: TreeSession) -> bytes:
        """The view of a session, as JSON."""
        if session.view is not None or self.store.storage is None:
            return session.view or b"{}"
        return await self.store.storage.run(self.store.storage.view(session.id))

    async def add_session(self, session: TreeSession) -> None:
        """Store a session; raises 429 if the user has too many."""
        limit = MAX_SESSIONS if self.store.storage is not None else self.store.limit
        if len(self.sessions()) >= limit:
            raise ApiError(
                429,
                f"no room for another session: at most {limit:,}; delete some of yours",
                code="sessions_full",
            )
        if self.store.replica:
            session.id = session.id.replace("-", f"-{self.store.replica}-", 1)
        row, view = session.row(), session.view or b"{}"
        await self._write_session(session, row, view)

    async def update_session(
        self, session: TreeSession, changes: dict[str, Any], view: bytes | None
    ) -> None:
        """Store a changed title or tags, and a new view."""
        await self._write_session(session, {**session.row(), **changes}, view)

    async def _write_session(
        self, session: TreeSession, row: dict[str, Any], view: bytes | None
    ) -> None:
        store = self.store
        if store.storage is None and view is not None:
            total = sum(len(other.view or b"") for other in store.sessions.values())
            if total + len(view) > MAX_VIEW_BYTES:
                raise ApiError(
                    429,
                    f"the views of all sessions have {total:,} bytes; without --state at most "
                    f"{MAX_VIEW_BYTES:,} fit",
                    code="views_full",
                )

        def apply() -> None:
            session.title, session.updated = row["title"], row["updated"]
            session.tags = tuple(row["tags"].split("\n")) if row["tags"] else ()
            if view is not None:
                session.view = view if store.storage is None else None
            store.sessions[session.id] = session

        job = None if store.storage is None else store.storage.session(row, view)
        await store.write(job, apply)

    async def delete_session(self, identity: str) -> None:
        session, when = self.session(identity), time.time()
        branches = self.in_session(session)

        def apply() -> None:
            for branch in branches:
                self.store._delete(branch, when)
            session.deleted = when

        await self._mark_deleted(session, branches, when, apply)

    async def restore_session(self, identity: str) -> TreeSession:
        """Bring back a deleted session with the branches that were deleted with it."""
        self.store.purge()
        session = self.session(identity, deleted=True)
        when = session.deleted
        if when is None:
            return session
        branches = [
            item
            for item in self.store.deleted.values()
            if item.session == identity and item.owner == self.user and item.deleted == when
        ]

        def apply() -> None:
            for branch in branches:
                self.store._restore(branch)
            session.deleted = None

        await self._mark_deleted(session, branches, None, apply)
        return session

    async def _mark_deleted(
        self,
        session: TreeSession,
        branches: Sequence[TreeBranch],
        when: float | None,
        apply: Callable[[], None],
    ) -> None:
        storage = self.store.storage
        names = [branch.id for branch in branches]
        job = None if storage is None else storage.deletion(names, when, session.id)
        await self.store.write(job, apply)

    async def search(self, words: Sequence[str]) -> list[set[str]] | None:
        """For each word: the sessions that have a branch with it. None: search in memory."""
        storage = self.store.storage
        if storage is None:
            return None
        matches = await storage.run(storage.search(words))
        sessions = {branch.number: branch.session for branch in self.all()}
        return [{sessions.get(number) or "" for number in numbers} for numbers in matches]


def _unpin(branch: TreeBranch) -> None:
    branch.pins -= 1
