"""The models of a server: loaded on demand, evicted when memory is needed.

    registry = ModelRegistry([ModelEntry("smollm", load_it, size)], model_memory=8 << 30)
    async with registry.use("smollm") as served:
        served.lm.begin(...)

A small state machine, all of it on the event loop; threads only load and close:

    absent -> loading -> loaded <-> draining -> closing -> absent

Every request takes a ticket and is a user of its model from the moment the ticket is granted.
Tickets are served first come, first served. A ticket for a loaded model is granted immediately. The
first ticket whose model does not fit evicts the least recently used models: idle ones are closed,
busy ones drain (new requests for them queue after that ticket). A model held by a request that
waits for a second one is never evicted: it would not become idle. Models are loaded one at a time,
and a loaded model is granted to all its waiting tickets before any other decision. So a model in
use is never closed, and a steady stream of requests for one model starves no other.

`_advance` makes all these decisions, without waiting, whenever something has changed. There are no
locks. A waiting request may be cancelled at any time.

A model whose files were rewritten gets a new version. The old one is retired: it serves its
current users and no new ones.

Models that are not listed are ephemeral, found by name (`find`): checkpoints of training runs,
puzzle solvers. At most MAX_EPHEMERAL of these are in memory at the same time.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import math
import re
import time
import traceback
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from unspool import __version__
from unspool.errors import SettingsError, UnspoolError
from unspool.model.adapters import WEIGHTS, is_adapter
from unspool.model.hub.find import find_model
from unspool.model.hub.memory import release_memory
from unspool.model.shipped import shipped_models
from unspool.server.http.errors import ApiError, shutting_down
from unspool.server.http.logs import log_event
from unspool.session import Session
from unspool.text.tools.formats import ToolFormat, tool_format

# -- LoRA adapters of the first model, served from a folder as `model:adapter`

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter that can be requested."""

    name: str  # `model:adapter`
    base: str
    folder: Path
    size: int
    stamp: int  # modification time of its weights

    @property
    def short_name(self) -> str:
        return self.folder.name


class AdapterFolder:
    """The adapters in one folder, each in a subfolder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise SettingsError(f"{folder}: no such folder of adapters")
        self._folder = folder.resolve()

    def entries(self, base: str) -> dict[str, AdapterEntry]:
        """The current adapters, by `base:name`. Skips links out of the folder, and names that
        would need quoting."""
        entries = {}
        for path in sorted(self._folder.iterdir()):
            is_inside = path.is_dir() and path.resolve().parent == self._folder
            if not (is_inside and _SAFE_NAME.fullmatch(path.name) and is_adapter(path)):
                continue
            weights = path / WEIGHTS
            if weights.is_file():
                stat = weights.stat()
                name = f"{base}:{path.name}"
                entries[name] = AdapterEntry(name, base, path, stat.st_size, stat.st_mtime_ns)
        return entries


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be served."""

    name: str
    load: Callable[[], Session]
    size: int  # bytes of its weights; the KV cache is not counted
    source: str = ""  # the store it was found in
    stamp: Hashable = 0  # changes when its files are rewritten


@dataclass(eq=False)
class ServedModel:
    """A model in memory, or a view of one with an adapter."""

    name: str
    lm: Session
    fingerprint: str  # `system_fingerprint`: equal fingerprint and seed give equal text
    tools: ToolFormat
    keep_alive: float | None  # seconds an idle model stays; None: until its memory is needed
    entry: ModelEntry
    version: int  # grows each time its files are rewritten
    users: int = 0  # requests that hold it
    last_used: float = field(default_factory=time.monotonic)  # time of its last release
    adapted: dict[str, ServedModel] = field(default_factory=dict)  # views, by `model:adapter`
    adapting: dict[str, tuple[int, asyncio.Task[ServedModel]]] = field(default_factory=dict)
    stamp: int = 0  # of an adapter: modification time of its weights
    base: ServedModel | None = None  # of an adapter: the model itself

    @property
    def is_alive(self) -> bool:
        """False once the engine is closed or its thread has ended."""
        return self.lm.engine.loop.alive

    @property
    def due(self) -> float:
        """When to close it, by time.monotonic()."""
        is_kept = self.users or self.keep_alive is None
        return math.inf if is_kept else self.last_used + (self.keep_alive or 0.0)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of more than `context` times this cannot fit."""
        tokenizer = self.lm.tokenizer
        return max(map(len, map(tokenizer.token_bytes, range(len(tokenizer)))))


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request that waits for a model."""

    entry: ModelEntry
    version: int
    turn: asyncio.Future[ServedModel]
    held_model: ServedModel | None  # that the request already has


@dataclass(eq=False, slots=True)
class _Loading:
    """The model that is being loaded."""

    entry: ModelEntry
    version: int
    task: asyncio.Task[None] | None = None


MAX_EPHEMERAL = 8  # the page compares up to six side by side
_THREADS = 8  # that load and close models


class ModelRegistry:
    """All models of one server. Every method runs on the event loop, except `add`."""

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        *,
        model_memory: int,
        keep_alive: float | None = None,
        adapters: AdapterFolder | None = None,
    ) -> None:
        names = [entry.name for entry in entries]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UnspoolError(f"two models are named {twice!r}; rename one: --model NAME=PATH")
        self.entries = {entry.name: entry for entry in entries}
        self.first = names[0]
        self.model_memory, self.keep_alive = model_memory, keep_alive
        self._adapters = adapters
        self.find: Callable[[str], ModelEntry | None] = lambda _: None
        self.on_loaded: Callable[[Session], None] = lambda _: None  # called on a thread
        self.find_local: Callable[[], list[ModelEntry]] = list  # the models on this machine
        self.loaded: dict[str, ServedModel] = {}
        self.created = int(time.time())
        self._tickets: list[_Ticket] = []  # those of requests that already hold a model first
        self._loading: _Loading | None = None
        self._draining: set[ServedModel] = set()  # of `loaded`; recomputed by `_advance`
        self._retired: set[ServedModel] = set()  # in use, and replaced by a newer version
        self._closing: dict[ServedModel, asyncio.Task[None]] = {}
        self._versions = itertools.count(1)
        self._released = asyncio.Event()  # a model became idle, or should be unloaded
        self._is_stopped = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="unspool-models")

    def add(self, entries: Sequence[ModelEntry]) -> None:
        """Add models. Thread-safe. A name that exists keeps its model."""
        new = {entry.name: entry for entry in entries if entry.name not in self.entries}
        self.entries = {**self.entries, **new}

    # -- names ---------------------------------------------------------------------------------

    @property
    def ephemeral(self) -> dict[str, ModelEntry]:
        """The ephemeral models in memory."""
        loaded = self.loaded.values()
        return {served.name: served.entry for served in loaded if served.name not in self.entries}

    def is_loading(self, name: str) -> bool:
        """Whether the model is being loaded, or queued for loading."""
        is_waiting = any(ticket.entry.name == name for ticket in self._tickets)
        return is_waiting or (self._loading is not None and self._loading.entry.name == name)

    def adapters(self) -> dict[str, AdapterEntry]:
        """The current adapters of the first model, by `model:adapter`."""
        return self._adapters.entries(self.first) if self._adapters is not None else {}

    def served(self, entry: ModelEntry | AdapterEntry) -> ServedModel | None:
        """The loaded model or adapter; None if it is not in memory."""
        if isinstance(entry, ModelEntry):
            return self.loaded.get(entry.name)
        base = self.loaded.get(entry.base)
        return base.adapted.get(entry.name) if base is not None else None

    def entry(self, name: str | None) -> ModelEntry | AdapterEntry:
        """Resolve a model name of a request; None is the first model. Raises 404."""
        if name is None:
            return self.entries[self.first]
        if name in self.entries:
            return self.entries[name]
        adapters = self.adapters()
        if name in adapters:
            return adapters[name]
        if (ephemeral := self.find(name)) is not None:
            return ephemeral
        if name in self.loaded:  # an ephemeral model outlives its files
            return self.loaded[name].entry
        matches = self._match_models(name) or self._match_adapters(name, adapters)
        if len(matches) != 1:
            available = ", ".join(matches or [*self.entries, *adapters])
            problem = "ambiguous model" if matches else "no such model:"
            message = f"{problem} {name[:100]!r}; available: {available}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.entries.get(matches[0]) or adapters[matches[0]]

    def _match_adapters(self, name: str, adapters: dict[str, AdapterEntry]) -> list[str]:
        """Adapters whose model is named by a prefix: `smollm2:poet`."""
        model, _, short = name.lower().removesuffix(":latest").rpartition(":")
        bases = self._match_models(model) if model else []
        return [
            adapter.name
            for adapter in adapters.values()
            if adapter.base in bases and adapter.short_name.lower() == short
        ]

    def _match_models(self, name: str) -> list[str]:
        """Models that a prefix of their name may mean, or Ollama's spelling `name:tag`."""
        pattern = re.sub("[:.]", "-", name.lower().removesuffix(":latest"))
        spellings = {listed: re.sub("[:.]", "-", listed.lower()) for listed in self.entries}
        exact_matches = [listed for listed, spelling in spellings.items() if spelling == pattern]
        return exact_matches or [
            listed
            for listed, spelling in spellings.items()
            if re.match(re.escape(pattern) + "[^a-z0-9]", spelling)
        ]

    # -- using a model -------------------------------------------------------------------------

    @asynccontextmanager
    async def use(
        self, name: str | None, *, beside: ServedModel | None = None
    ) -> AsyncIterator[ServedModel]:
        """Hold a model; it is loaded first if it is not in memory.

        Args:
            name: The model, or `model:adapter`; None for the first model.
            beside: The model that the request already holds. Such a request goes first, and fails
                immediately where waiting cannot help: both do not fit together, or everything that
                could be evicted is held by requests that wait for memory too.
        """
        entry = self.entry(name)
        if isinstance(entry, AdapterEntry):
            async with self.use(entry.base, beside=beside) as base:
                yield await self._adapt(base, entry)
            return
        served = await self._acquire(entry, beside)
        try:
            yield served
        finally:
            self._release(served)

    async def _acquire(self, entry: ModelEntry, beside: ServedModel | None) -> ServedModel:
        """Wait for a model, and become its user."""
        holding = None if beside is None else beside.base or beside
        turn: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        ticket = _Ticket(entry, self._current_version(entry), turn, holding)
        if holding is None:
            self._tickets.append(ticket)
        else:
            others = sum(other.held_model is not None for other in self._tickets)
            self._tickets.insert(others, ticket)
        self._advance()
        try:
            return await turn
        except BaseException:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
                self._advance()  # tickets after it may proceed
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self._release(turn.result())  # it was granted just before the cancellation
            raise

    def _current_version(self, entry: ModelEntry) -> int:
        """The newest known version of a model; a new one if its files were rewritten since."""
        versions: list[_Ticket | _Loading | ServedModel] = [
            ticket for ticket in self._tickets if ticket.entry.name == entry.name
        ]
        if self._loading is not None and self._loading.entry.name == entry.name:
            versions.append(self._loading)
        if entry.name in self.loaded:
            versions.append(self.loaded[entry.name])
        newest = max(versions, key=lambda item: item.version, default=None)
        is_same = newest is not None and newest.entry.stamp == entry.stamp
        return newest.version if newest is not None and is_same else next(self._versions)

    def _release(self, served: ServedModel) -> None:
        served.users -= 1
        served.last_used = time.monotonic()
        if served.users:
            return
        if served in self._retired:
            self._begin_close(served)
        self._released.set()
        self._advance()

    # -- decisions -----------------------------------------------------------------------------

    def _advance(self) -> None:
        """Grant, load and close everything that is possible now, in the order of the tickets."""
        if self._is_stopped:
            self._fail(self._tickets, shutting_down())
            return
        self._refuse_deadlocks()
        self._draining.clear()
        is_blocked = self._loading is not None
        for ticket in list(self._tickets):
            served = self.loaded.get(ticket.entry.name)
            if served is not None and served.version < ticket.version:
                self._retire(served)
                served = None
            if served is not None:
                if served not in self._draining or ticket.held_model is not None:
                    self._grant(ticket, served)
            elif not is_blocked:
                is_blocked = True
                self._load_or_make_room(ticket)

    def _grant(self, ticket: _Ticket, served: ServedModel) -> None:
        self._tickets.remove(ticket)
        if not ticket.turn.done():  # done: cancelled, and not yet removed
            served.users += 1
            ticket.turn.set_result(served)

    def _fail(self, tickets: Iterable[_Ticket], error: Exception) -> None:
        for ticket in list(tickets):
            self._tickets.remove(ticket)
            if not ticket.turn.done():
                ticket.turn.set_exception(error)

    def _retire(self, served: ServedModel) -> None:
        """Admit no new users to a model, and close it when the last one releases it."""
        del self.loaded[served.name]
        self._retired.add(served)
        if not served.users:
            self._begin_close(served)

    def _load_or_make_room(self, ticket: _Ticket) -> None:
        """Start to load a ticket's model, or evict others until it fits."""
        leaving = self._choose_evicted(ticket.entry, self._able_to_leave())
        assert leaving is not None  # else `_refuse_deadlocks` has failed the ticket
        # Wait for an instance of the same model that is being closed: never two of them.
        leaving += [served for served in self._closing if served.name == ticket.entry.name]
        if not leaving:
            same_model = [other for other in self._tickets if other.entry.name == ticket.entry.name]
            newest = max(same_model, key=lambda other: other.version)
            self._loading = _Loading(newest.entry, newest.version)
            self._loading.task = asyncio.ensure_future(self._load(self._loading))
        for served in leaving:
            if self.loaded.get(served.name) is not served:
                continue  # already closing or retired
            if served.users:
                self._draining.add(served)
            else:
                self._begin_close(served)

    def _in_memory(self) -> list[ServedModel]:
        """All models in memory, in the order of eviction."""
        loaded = sorted(self.loaded.values(), key=lambda served: served.last_used)
        idle = [served for served in loaded if not served.users]
        busy = [served for served in loaded if served.users]
        return [*self._closing, *idle, *self._retired, *busy]

    def _able_to_leave(self) -> list[ServedModel]:
        """The models in memory that will become idle: not those held by requests that wait for
        memory themselves."""
        held_models = {ticket.held_model for ticket in self._tickets}
        return [served for served in self._in_memory() if served not in held_models]

    def _choose_evicted(
        self, entry: ModelEntry, candidates: Sequence[ServedModel]
    ) -> list[ServedModel] | None:
        """Choose which candidates to evict so that a model fits; None if all are not enough. A
        model larger than the memory for all models is loaded alone."""
        staying = dict.fromkeys(self._in_memory())

        def is_crowded() -> bool:
            ephemeral = sum(served.name not in self.entries for served in staying)
            return entry.name not in self.entries and ephemeral >= MAX_EPHEMERAL

        def is_full() -> bool:
            sizes = [served.entry.size for served in staying]
            return bool(sizes) and sum(sizes) + entry.size > self.model_memory

        for served in candidates:
            if is_crowded() and served.name not in self.entries:
                del staying[served]
        for served in candidates:
            if is_full() and served in staying:
                del staying[served]
        if is_crowded() or is_full():
            return None
        return [served for served in self._in_memory() if served not in staying]

    def _refuse_deadlocks(self) -> None:
        """Fail requests that hold a model and wait for memory that cannot be freed, because it is
        held by requests that wait for memory as well. The youngest fails first."""
        waiting = [ticket for ticket in reversed(self._tickets) if ticket.held_model is not None]
        for ticket in waiting:
            entry, holding = ticket.entry, ticket.held_model
            served = self.loaded.get(entry.name)
            if holding is None or (served is not None and served.version >= ticket.version):
                continue
            if self._loading is not None and self._loading.entry.name == entry.name:
                continue
            if self._choose_evicted(entry, self._able_to_leave()) is not None:
                continue
            sizes = f"{entry.name} has {entry.size:,} bytes of weights"
            if entry.size + holding.entry.size > self.model_memory:
                message = (
                    f"{entry.name} and {holding.name} do not fit together: {sizes}, "
                    f"{holding.name} {holding.entry.size:,}, and --model-memory is "
                    f"{self.model_memory:,}"
                )
                error = ApiError(400, message, code="models_do_not_fit")
            else:
                message = f"not enough memory for {entry.name} now; {sizes}"
                error = ApiError(503, message, code="overloaded", retry_after=1)
            self._fail([ticket], error)

    # -- loading and closing -------------------------------------------------------------------

    async def _load(self, loading: _Loading) -> None:
        entry = loading.entry
        result = self._threads.submit(
            _load_model, entry, loading.version, self.keep_alive, self.on_loaded
        )
        try:
            outcome = await asyncio.wrap_future(result)
        except asyncio.CancelledError:  # the server has stopped; close the model once it is loaded
            result.add_done_callback(_close_result)
            raise
        finally:
            self._loading = None
        # Tickets for this version, or an older one.
        waiting = [
            ticket
            for ticket in self._tickets
            if ticket.entry.name == entry.name and ticket.version <= loading.version
        ]
        if isinstance(outcome, ServedModel):
            self.loaded[entry.name] = outcome
            for ticket in waiting:  # they are users before any other decision
                self._grant(ticket, outcome)
            if not outcome.users:
                self._released.set()  # its keep_alive may be 0
        else:
            self._fail(waiting, outcome)
        self._advance()

    def _begin_close(self, served: ServedModel) -> None:
        """Close a model on a thread. Its memory counts as used until then."""
        self._retired.discard(served)
        if self.loaded.get(served.name) is served:  # not a newer version of the same name
            del self.loaded[served.name]
        self._closing[served] = asyncio.ensure_future(self._close(served))

    async def _close(self, served: ServedModel) -> None:
        try:
            await asyncio.wrap_future(self._threads.submit(_close_model, served.lm))
        except Exception as error:
            log_event("close_failed", logging.ERROR, exc_info=error, model=served.name)
        finally:
            del self._closing[served]
        self._advance()

    def unload(self, name: str) -> None:
        """Close a model as soon as it is idle; for an adapter, its base model."""
        entry = self.entry(name)
        served = self.loaded.get(entry.base if isinstance(entry, AdapterEntry) else entry.name)
        if served is not None:
            served.keep_alive = 0.0
            self._released.set()

    async def close_idle(self) -> None:
        """Close models that were idle for their `keep_alive`. Runs until it is cancelled."""
        while True:
            self._released.clear()
            for due_now in [
                served for served in self.loaded.values() if served.due <= time.monotonic()
            ]:
                self._begin_close(due_now)
                del due_now  # else this frame keeps the model alive while it waits
            due = min((served.due for served in self.loaded.values()), default=math.inf)
            with suppress(TimeoutError):
                remaining = None if due == math.inf else max(0.0, due - time.monotonic())
                async with asyncio.timeout(remaining):
                    await self._released.wait()

    async def close_all(self) -> None:
        """Close every model for good; requests that wait for one fail."""
        self._is_stopped = True
        self._advance()
        if self._loading is not None and self._loading.task is not None:
            self._loading.task.cancel()
        for served in [*self.loaded.values(), *self._retired]:
            self._begin_close(served)
        await asyncio.gather(*self._closing.values())

    # -- adapters ------------------------------------------------------------------------------

    async def _adapt(self, base: ServedModel, entry: AdapterEntry) -> ServedModel:
        """A view of the model with an adapter, which is loaded if it is new or has changed.

        Versions of one adapter are loaded one after the other: the engine keeps the last.
        """
        while True:
            adapted = base.adapted.get(entry.name)
            if adapted is not None and adapted.stamp == entry.stamp:
                return adapted
            if entry.name not in base.adapting:
                task = asyncio.ensure_future(self._load_adapter(base, entry))
                base.adapting[entry.name] = entry.stamp, task
            stamp, task = base.adapting[entry.name]
            if stamp == entry.stamp:
                return await asyncio.shield(task)
            await asyncio.wait((task,))

    async def _load_adapter(self, base: ServedModel, entry: AdapterEntry) -> ServedModel:
        try:
            outcome = await asyncio.wrap_future(self._threads.submit(_load_adapter, base, entry))
        finally:
            del base.adapting[entry.name]
        if not isinstance(outcome, ServedModel):
            raise outcome
        base.adapted[entry.name] = outcome
        return outcome


# -- on threads --------------------------------------------------------------------------------


def _load_model(
    entry: ModelEntry,
    version: int,
    keep_alive: float | None,
    on_loaded: Callable[[Session], None],
) -> ServedModel | Exception:
    """Load a model. Errors are returned: a future cannot carry every exception."""
    lm: Session | None = None
    try:
        lm = entry.load()
        lm.engine  # noqa: B018  starts the engine before the first request
        lm.tokenizer.encoder.library  # noqa: B018  builds it before the first long prompt
        on_loaded(lm)
        source = lm.tokenizer.chat_template
        return ServedModel(
            entry.name,
            lm,
            fingerprint=system_fingerprint(lm),
            tools=tool_format(source, lm.tokenizer),
            keep_alive=keep_alive,
            entry=entry,
            version=version,
        )
    except BaseException as error:
        if lm is not None:
            lm.close()
        return _as_exception(error)


def system_fingerprint(lm: Session) -> str:
    """Short hash of everything that a text depends on besides its request.

    Covers the version of Unspool, the model's weights, config, chat template and vocabulary, the
    context, the precision of weights and KV cache, the backend, the instruction set or GPU, and
    `exact`. It does not cover the number of threads, memory or batch, which change no text.
    """
    tokenizer = lm.tokenizer
    return _short_hash(
        __version__,
        lm.model.fingerprint(),
        json.dumps(lm.config.to_dict(), sort_keys=True, default=str),
        [tokenizer.kind, tokenizer.vocab_size, sorted(tokenizer.special_tokens.items())],
        tokenizer.chat_template,
        lm.context,
        lm.model.precision,
        lm.model.numerics,
    )


def _short_hash(*parts: object) -> str:
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _load_adapter(base: ServedModel, entry: AdapterEntry) -> ServedModel | Exception:
    """Load an adapter; the view shares everything else with the model."""
    try:
        base.lm.load_adapter(entry.short_name, entry.folder)
        return replace(
            base,
            name=entry.name,
            lm=base.lm.adapted(entry.short_name),
            fingerprint=_short_hash(base.fingerprint, entry.short_name, entry.stamp),
            stamp=entry.stamp,
            base=base,
            adapted={},
            adapting={},
        )
    except BaseException as error:
        return _as_exception(error)


def _as_exception(error: BaseException) -> Exception:
    """An error that a future may carry: not StopIteration, nor one that ends the process. Local
    variables of its frames are cleared, as they may hold weights."""
    inner: BaseException | None = error
    while inner is not None:
        traceback.clear_frames(inner.__traceback__)
        inner = inner.__cause__ or inner.__context__
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = RuntimeError(f"loading ended with {type(error).__name__}: {error}")
    return wrapped.with_traceback(error.__traceback__)


def _close_model(lm: Session) -> None:
    lm.close()
    del lm
    release_memory()


def _close_result(result: Future[ServedModel | Exception]) -> None:
    if not result.cancelled() and isinstance(outcome := result.result(), ServedModel):
        _close_model(outcome.lm)


# -- Ephemeral models: in no list, requested by name, such as checkpoints of training runs

_KV_CACHE_BYTES = 256 << 20  # of each ephemeral model


def ephemeral_entry(name: str, folder: Path, source: str) -> ModelEntry:
    """An ephemeral model by its name and folder."""
    load = partial(_load_ephemeral, folder)
    return ModelEntry(name, load, _weights_bytes(folder), source=source, stamp=_file_stamps(folder))


def shipped_entry(name: str) -> ModelEntry | None:
    """A model shipped with Unspool; None for any other name."""
    folder = shipped_models().get(name)
    return None if folder is None else ephemeral_entry(name, folder, "shipped")


def _file_stamps(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """A value that changes when a file of the model is rewritten, added or removed."""
    stamps = []
    for file in sorted(folder.glob("*")):
        with suppress(OSError):  # just removed
            stat = file.stat()
            stamps.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(stamps)


def _weights_bytes(model: Path) -> int:
    """Bytes of weights; those of an adapter include its base model."""
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.gguf")]
    size = sum(file.stat().st_size for file in files)
    with suppress(OSError, ValueError, KeyError, TypeError, UnspoolError):
        config = json.loads((model / "adapter_config.json").read_text(encoding="utf-8"))
        size += _weights_bytes(
            find_model(config["base_model_name_or_path"], offline=True, progress=False)
        )
    return size


def _load_ephemeral(folder: Path) -> Session:
    from unspool.loading import load

    return load(folder, memory=_KV_CACHE_BYTES, offline=True, progress=False)
