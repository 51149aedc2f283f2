"""The models a server has: loaded when first asked for, put back when memory is needed.

    registry = ModelRegistry([ModelEntry("smollm", load_it)], room=8 << 30)
    async with registry.use("smollm") as served:
        served.lm.begin(...)

One model is loaded at a time. Room for it is made by closing models that nobody uses, the one
that was used longest ago first. A model that is in use is never closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property

from unspool import __version__
from unspool.errors import UnspoolError
from unspool.serve.http.errors import ApiError
from unspool.serve.http.threads import in_thread
from unspool.session import LanguageModel
from unspool.text.tools.formats import ToolFormat, tool_format


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be served."""

    name: str
    load: Callable[[], LanguageModel]
    size: int  # bytes it is expected to take, keys and values not counted
    source: str = ""  # whose store it was found in


@dataclass(eq=False)
class ServedModel:
    """A model in memory."""

    name: str
    lm: LanguageModel
    fingerprint: str  # `system_fingerprint`: the same one, the same seed, the same text
    tools: ToolFormat
    users: int = 0
    used: float = field(default_factory=time.monotonic)

    @property
    def is_alive(self) -> bool:
        """False once the engine was closed or its thread is gone: it takes no requests then."""
        return self.lm.engine.loop.alive

    @cached_property
    def longest_token(self) -> int:
        """In bytes: a text of more than `context` times this cannot fit."""
        tokenizer = self.lm.tokenizer
        return max(map(len, map(tokenizer.token_bytes, range(len(tokenizer)))))


class ModelRegistry:
    """All models of one server."""

    def __init__(
        self, entries: Sequence[ModelEntry], *, room: int, idle: float | None = None
    ) -> None:
        names = [entry.name for entry in entries]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UnspoolError(f"two models are called {twice!r}; name one: --model NAME=PATH")
        self.entries = {entry.name: entry for entry in entries}
        self.first = names[0]
        self.room, self.idle = room, idle
        self.loaded: dict[str, ServedModel] = {}
        self.created = int(time.time())
        self._loading = asyncio.Lock()
        self._tasks: dict[str, asyncio.Future[None]] = {}  # of models that are being loaded
        self._freed = asyncio.Event()  # a model lost its last user

    def add(self, entries: Sequence[ModelEntry]) -> None:
        """More models, found later; on any thread. A name that is taken keeps its model."""
        new = {entry.name: entry for entry in entries if entry.name not in self.entries}
        self.entries = {**self.entries, **new}

    def is_loading(self, name: str) -> bool:
        return name in self._tasks

    def entry(self, name: str | None) -> ModelEntry:
        """What a request means by a model's name; without one, the first model."""
        if name is None:
            return self.entries[self.first]
        if name not in self.entries:
            known = ", ".join(self.entries)
            raise ApiError(
                404,
                f"there is no model {name[:100]!r}; there is {known}",
                param="model",
                code="model_not_found",
            )
        return self.entries[name]

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """A model for as long as it is needed; loaded first if it is not."""
        served = await self._loaded(name)
        served.users += 1
        try:
            yield served
        finally:
            served.users -= 1
            served.used = time.monotonic()
            if not served.users:
                self._freed.set()

    async def _loaded(self, name: str | None) -> ServedModel:
        entry = self.entry(name)
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
                self.loaded[entry.name] = await in_thread(_load_model, entry)
        finally:
            del self._tasks[entry.name]

    async def _make_room(self, entry: ModelEntry) -> None:
        """Close models that nobody uses until this one fits; wait for those that are in use."""
        while self._taken() + entry.size > self.room and self.loaded:
            unused = [served for served in self.loaded.values() if not served.users]
            if unused:
                await self.close(min(unused, key=lambda served: served.used))
                continue
            self._freed.clear()
            await self._freed.wait()

    def _taken(self) -> int:
        return sum(self.entries[name].size for name in self.loaded)

    async def close(self, served: ServedModel) -> None:
        """Stop a model's engine and let its memory go."""
        self.loaded.pop(served.name, None)
        await in_thread(served.lm.close)

    async def close_idle(self) -> None:
        """Close what has not been used for `idle` seconds; for ever, as long as the server runs."""
        while self.idle is not None:
            await asyncio.sleep(min(self.idle, 10.0))
            now = time.monotonic()
            for served in list(self.loaded.values()):
                if not served.users and now - served.used >= self.idle:
                    await self.close(served)

    async def close_all(self) -> None:
        for served in list(self.loaded.values()):
            await self.close(served)


def _load_model(entry: ModelEntry) -> ServedModel:
    lm = entry.load()
    lm.engine  # noqa: B018  starts the engine, so that the first request need not wait for it
    source = lm.tokenizer.chat_template
    print_of = f"{__version__} {lm.model.fingerprint()} {lm.model.precision} {lm.model.device}"
    return ServedModel(
        entry.name,
        lm,
        fingerprint="fp_" + hashlib.sha256(print_of.encode()).hexdigest()[:12],
        tools=tool_format(source, lm.tokenizer),
    )
