"""The models a server has: loaded when first asked for, put back when memory is needed.

    registry = ModelRegistry([ModelEntry("smollm", load_it)], room=8 << 30)
    async with registry.use("smollm") as served:
        served.lm.begin(...)

One model is loaded at a time. Room for it is made by closing models that nobody uses, the one
that was used longest ago first. A model that is in use is never closed.

Beside the models that are listed there are passing ones, found by their names when somebody asks
(`find`): checkpoints of trainings, puzzle solvers. Of these only so many are in memory at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from unspool import __version__
from unspool.errors import UnspoolError
from unspool.serve.core.adapters import AdapterEntry, AdapterFolder
from unspool.serve.http.errors import ApiError
from unspool.serve.http.threads import load_in_thread
from unspool.session import Session
from unspool.text.tools.formats import ToolFormat, tool_format


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be served."""

    name: str
    load: Callable[[], Session]
    size: int  # bytes it is expected to take, keys and values not counted
    source: str = ""  # whose store it was found in
    made: int = 0  # tells its files from others that have its name later


@dataclass(eq=False)
class ServedModel:
    """A model in memory."""

    name: str
    lm: Session
    fingerprint: str  # `system_fingerprint`: the same one, the same seed, the same text
    tools: ToolFormat
    keep_alive: float | None  # seconds it stays when nobody uses it; None: until room is needed
    users: int = 0
    used: float = field(default_factory=time.monotonic)
    adapted: dict[str, ServedModel] = field(default_factory=dict)  # the same with adapters
    stamp: int = 0  # of an adapter: when its weights were written

    @property
    def is_alive(self) -> bool:
        """False once the engine was closed or its thread is gone: it takes no requests then."""
        return self.lm.engine.loop.alive

    @property
    def due(self) -> float:
        """When it is to go, by time.monotonic()."""
        forever = self.users or self.keep_alive is None
        return math.inf if forever else self.used + (self.keep_alive or 0.0)

    @cached_property
    def longest_token(self) -> int:
        """In bytes: a text of more than `context` times this cannot fit."""
        tokenizer = self.lm.tokenizer
        return max(map(len, map(tokenizer.token_bytes, range(len(tokenizer)))))


MAX_PASSING = 8  # as many as are looked at side by side, and two more


class ModelRegistry:
    """All models of one server."""

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        *,
        room: int,
        idle: float | None = None,
        adapters: AdapterFolder | None = None,
    ) -> None:
        names = [entry.name for entry in entries]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UnspoolError(f"two models are called {twice!r}; name one: --model NAME=PATH")
        self.entries = {entry.name: entry for entry in entries}
        self.first = names[0]
        self.room, self.idle = room, idle
        self._adapters = adapters
        self.find: Callable[[str], ModelEntry | None] = lambda _: None
        self.passing: dict[str, ModelEntry] = {}  # that were found so
        self.loaded: dict[str, ServedModel] = {}
        self.created = int(time.time())
        self._loading = asyncio.Lock()
        self._tasks: dict[str, asyncio.Future[None]] = {}  # of models that are being loaded
        self._freed = asyncio.Event()  # a model lost its last user: for who waits for room ...
        self._released = asyncio.Event()  # ... and for who lets unused models go

    def add(self, entries: Sequence[ModelEntry]) -> None:
        """More models, found later; on any thread. A name that is taken keeps its model."""
        new = {entry.name: entry for entry in entries if entry.name not in self.entries}
        self.entries = {**self.entries, **new}

    def is_loading(self, name: str) -> bool:
        return name in self._tasks

    def adapters(self) -> dict[str, AdapterEntry]:
        """The adapters of the first model that are there now, by `model:adapter`."""
        return self._adapters.entries(self.first) if self._adapters is not None else {}

    def served(self, entry: ModelEntry | AdapterEntry) -> ServedModel | None:
        """What is in memory of it."""
        if isinstance(entry, ModelEntry):
            return self.loaded.get(entry.name)
        base = self.loaded.get(entry.base)
        return base.adapted.get(entry.name) if base is not None else None

    def entry(self, name: str | None) -> ModelEntry | AdapterEntry:
        """What a request means by a model's name; without one, the first model."""
        if name is None:
            return self.entries[self.first]
        if name in self.entries:
            return self.entries[name]
        adapters = self.adapters()
        if name in adapters:
            return adapters[name]
        if (passing := self._passing(name)) is not None:
            return passing
        found = self._meant_by(name.lower())
        if len(found) != 1:
            known = ", ".join(found or [*self.entries, *adapters])
            wrong = "several models are" if found else "there is no model"
            message = f"{wrong} {name[:100]!r}; there is {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.entries[found[0]]

    def _passing(self, name: str) -> ModelEntry | None:
        """A model that is not listed; one in memory stays known when its files are gone."""
        found = self.find(name)
        if found is None:
            return self.passing.get(name) if name in self.loaded else None
        served = self.loaded.get(found.name)
        is_stale = served is not None and self.passing[found.name].made != found.made
        if served is not None and is_stale and not served.users:  # its files are others now
            del self.loaded[found.name]
            asyncio.get_running_loop().run_in_executor(None, served.lm.close)
        self.passing[found.name] = found
        return found

    def _meant_by(self, name: str) -> list[str]:
        """Models that a shorter name may mean, or one as Ollama writes it: `name:tag`."""
        wanted = re.sub("[:.]", "-", name.removesuffix(":latest"))
        known = {own: re.sub("[:.]", "-", own.lower()) for own in self.entries}
        same = [own for own, spelled in known.items() if spelled == wanted]
        return same or [
            own
            for own, spelled in known.items()
            if re.match(re.escape(wanted) + "[^a-z0-9]", spelled)
        ]

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """A model for as long as it is needed; loaded first if it is not."""
        entry = self.entry(name)
        if isinstance(entry, AdapterEntry):
            async with self.use(entry.base) as base:
                yield await self._adapted(base, entry)
            return
        served = await self._loaded(entry)
        served.users += 1
        try:
            yield served
        finally:
            served.users -= 1
            served.used = time.monotonic()
            if not served.users:
                self._freed.set()
                self._released.set()

    async def _adapted(self, base: ServedModel, entry: AdapterEntry) -> ServedModel:
        """The model with an adapter, which is loaded if it is not, or if it has changed."""
        async with self._loading:
            known = base.adapted.get(entry.name)
            if known is None or known.stamp != entry.stamp:
                known = base.adapted[entry.name] = await load_in_thread(_load_adapter, base, entry)
        return known

    async def _loaded(self, entry: ModelEntry) -> ServedModel:
        while (served := self.loaded.get(entry.name)) is None:
            if entry.name not in self._tasks:
                self._tasks[entry.name] = asyncio.ensure_future(self._load(entry))
            # Who asked for it may leave; the model is loaded all the same, for the next one.
            await asyncio.shield(self._tasks[entry.name])
        return served

    async def _load(self, entry: ModelEntry) -> None:
        try:
            async with self._loading:
                await self._make_room(entry)
                self.loaded[entry.name] = await load_in_thread(_load_model, entry, self.idle)
        finally:
            del self._tasks[entry.name]

    async def _make_room(self, entry: ModelEntry) -> None:
        """Close models that nobody uses until this one fits; wait for those that are in use."""
        while among := self._too_many(entry):
            unused = [served for served in among if not served.users]
            if unused:
                await self.close(min(unused, key=lambda served: served.used))
                continue
            self._freed.clear()
            await self._freed.wait()

    def _too_many(self, entry: ModelEntry) -> list[ServedModel]:
        """Of which models one must go before this one fits; none: it does."""
        passing = [served for name, served in self.loaded.items() if name in self.passing]
        if entry.name in self.passing and len(passing) >= MAX_PASSING:
            return passing
        known = {**self.entries, **self.passing}
        taken = sum(known[name].size for name in self.loaded)
        return list(self.loaded.values()) if taken + entry.size > self.room else []

    async def close(self, served: ServedModel) -> None:
        """Stop a model's engine and let its memory go."""
        self.loaded.pop(served.name, None)
        await load_in_thread(served.lm.close)

    def unload(self, name: str) -> None:
        """Have a model closed as soon as nobody uses it."""
        served = self.loaded.get(self.entry(name).name)
        if served is not None:
            served.keep_alive = 0.0
            self._released.set()

    async def close_idle(self) -> None:
        """Close what has not been used for its time; for ever, as long as the server runs."""
        while True:
            self._released.clear()
            for served in list(self.loaded.values()):
                if served.due <= time.monotonic():
                    await self.close(served)
            due = min((served.due for served in self.loaded.values()), default=math.inf)
            with suppress(TimeoutError):
                left = None if due == math.inf else max(0.0, due - time.monotonic())
                async with asyncio.timeout(left):
                    await self._released.wait()

    async def close_all(self) -> None:
        for served in list(self.loaded.values()):
            await self.close(served)


def _load_model(entry: ModelEntry, keep_alive: float | None) -> ServedModel:
    lm = entry.load()
    lm.engine  # noqa: B018  starts the engine, so that the first request need not wait for it
    source = lm.tokenizer.chat_template
    print_of = f"{__version__} {lm.model.fingerprint()} {lm.model.precision} {lm.model.device}"
    return ServedModel(
        entry.name,
        lm,
        fingerprint="fp_" + hashlib.sha256(print_of.encode()).hexdigest()[:12],
        tools=tool_format(source, lm.tokenizer),
        keep_alive=keep_alive,
    )


def _load_adapter(served: ServedModel, entry: AdapterEntry) -> ServedModel:
    """The model with an adapter, taken into memory; it shares everything else with the model."""
    served.lm.load_adapter(entry.short, entry.folder)
    seen = f"{served.fingerprint} {entry.short} {entry.stamp}"
    return replace(
        served,
        name=entry.name,
        lm=served.lm.adapted(entry.short),
        fingerprint="fp_" + hashlib.sha256(seen.encode()).hexdigest()[:12],
        stamp=entry.stamp,
        adapted={},
    )
