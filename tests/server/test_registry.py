"""The registry of models, on models that are made up: no deadlock, no livelock, nothing stale."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.running_server import in_event_loop
from unspool.model.adapters import WEIGHTS
from unspool.server.http.errors import ApiError
from unspool.server.runtime import registry as registries
from unspool.server.runtime.registry import AdapterFolder, ModelEntry, ModelRegistry


@pytest.fixture(autouse=True, scope="module")
def without_tools():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registries, "tool_format", lambda *_: None)
        patch.setattr(registries, "system_fingerprint", lambda lm: lm.name)
        patch.setattr(registries, "release_memory", lambda: None)  # half a second each
        yield


class FakeModel:
    """As much of a session as the registry needs; knows what was done to it."""

    def __init__(self, machine: Machine, entry: ModelEntry) -> None:
        self.machine, self.entry = machine, entry
        self.name, self.size = entry.name, entry.size
        self.content = machine.contents[self.name]  # newer than the stamp if rewritten since
        self.is_closed, self.adapters = False, {}
        encoder = SimpleNamespace(library=None)
        self.tokenizer = SimpleNamespace(chat_template=None, encoder=encoder)
        self.engine = SimpleNamespace(loop=SimpleNamespace(alive=True))

    def load_adapter(self, name: str, folder: Path) -> None:
        time.sleep(self.machine.delay)
        weights = (folder / WEIGHTS).read_text()
        self.adapters[name] = weights

    def adapted(self, name: str) -> Any:
        return SimpleNamespace(content=self.adapters[name], close=self.close, base=self)

    def close(self) -> None:
        assert not self.is_closed, f"{self.name} is closed twice"
        self.is_closed = True
        time.sleep(self.machine.delay)
        self.machine.free(self)


@dataclass
class Machine:
    """The memory that models take while they are loaded, in use and being closed."""

    room: int
    delay: float = 0.0
    models: list[FakeModel] = field(default_factory=list)
    contents: Counter[str] = field(default_factory=Counter)  # what a model's files hold now
    broken: set[str] = field(default_factory=set)  # models that cannot be loaded now
    peak: int = 0
    loads: Counter[str] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.Lock)

    def entry(self, name: str, size: int, stamp: int = 0) -> ModelEntry:
        def load() -> Any:
            with self._lock:
                others = [(m.name, m.entry.stamp) for m in self.models]
                assert (name, stamp) not in others, f"two instances of {name} {stamp}"
                model = FakeModel(self, entry)
                self.models.append(model)
                self.loads[name] += 1
                self.peak = max(self.peak, sum(item.size for item in self.models))
            time.sleep(self.delay)
            if name in self.broken:
                self.free(model)
                raise StopIteration(f"{name} is damaged")  # the worst to pass through a future
            return model

        entry = ModelEntry(name, load, size, stamp=stamp)
        return entry

    def find(self, name: str, size: int) -> ModelEntry:
        return self.entry(name, size, self.contents[name])

    def registry(self, checkpoint: int = 0, **sizes: int) -> ModelRegistry:
        """A registry of models of these sizes, and of a checkpoint `run@1` that is not listed."""
        entries = [self.entry(name, size) for name, size in sizes.items()]
        registry = ModelRegistry(entries, model_memory=self.room)
        registry.find = lambda name: self.find(name, checkpoint) if name == "run@1" else None
        return registry

    def free(self, model: FakeModel) -> None:
        with self._lock:
            self.models.remove(model)


async def until(is_true: Callable[[], Any]) -> None:
    while not is_true():
        await asyncio.sleep(0.001)


async def answer(registry: ModelRegistry, name: str, seconds: float = 0.0) -> Any:
    """A request: gives the content of the model, or of the adapter, that answered it."""
    async with registry.use(name) as served:
        model = getattr(served.lm, "base", served.lm)
        assert not model.is_closed, f"{name} was closed while in use"
        await asyncio.sleep(seconds)
        assert not model.is_closed, f"{name} was closed while in use"
        return served.lm.content


def write_adapter(folder: Path, content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    fresh = folder / "fresh"
    fresh.write_text(content)
    fresh.replace(folder / WEIGHTS)


# -- what went wrong once ----------------------------------------------------------------------


@in_event_loop
async def test_two_models_that_do_not_fit_together_are_both_answered():
    machine = Machine(room=10, delay=0.01)
    registry = machine.registry(a=7, b=7)
    await asyncio.gather(*(answer(registry, name) for name in "abab"))
    assert machine.loads == {"a": 1, "b": 1} and machine.peak == 7
    await registry.close_all()


@in_event_loop
async def test_an_adapter_of_a_model_that_another_waits_for(tmp_path: Path):
    """The request for the adapter is a user of A, and B waits until A is idle."""
    write_adapter(tmp_path / "poet", "poems")
    machine = Machine(room=10, delay=0.01)
    entries = [machine.entry("a", 7), machine.entry("b", 7)]
    registry = ModelRegistry(entries, model_memory=10, adapters=AdapterFolder(tmp_path))
    async with registry.use("a"):
        other = asyncio.ensure_future(answer(registry, "b"))
        await until(lambda: registry.is_loading("b"))
        await asyncio.sleep(0.01)
        adapted = asyncio.ensure_future(answer(registry, "a:poet"))
        await asyncio.sleep(0.01)
    assert await asyncio.gather(other, adapted) == [0, "poems"]
    await registry.close_all()


@in_event_loop
async def test_a_checkpoint_rewritten_while_in_use_is_loaded_anew():
    machine = Machine(room=100, delay=0.02)
    registry = machine.registry(checkpoint=5, first=1)
    async with registry.use("run@1") as old:
        assert old.lm.content == 0
        machine.contents["run@1"] = 1
        assert await answer(registry, "run@1") == 1
        assert not old.lm.is_closed
        assert await answer(registry, "run@1") == 1
        new = registry.loaded["run@1"]
    await until(lambda: old.lm not in machine.models)
    assert registry.loaded["run@1"] is new and not new.lm.is_closed
    assert await answer(registry, "run@1") == 1
    assert machine.loads["run@1"] == 2
    await registry.close_all()
    assert not machine.models


@in_event_loop
async def test_a_checkpoint_rewritten_while_it_is_loaded():
    machine = Machine(room=100, delay=0.05)
    registry = machine.registry(checkpoint=5, first=1)
    early = asyncio.ensure_future(answer(registry, "run@1"))
    await until(lambda: machine.loads["run@1"])
    machine.contents["run@1"] = 1
    assert await answer(registry, "run@1") == 1
    assert await early == 0
    await registry.close_all()


@in_event_loop
async def test_a_checkpoint_rewritten_between_its_request_and_its_load():
    """It has newer content than its stamp says. The next request sees another stamp and loads
    anew: equal content in two versions, for the registry knows only the stamps."""
    machine = Machine(room=100)
    registry = ModelRegistry([machine.entry("first", 1)], model_memory=100)

    def find(name: str) -> ModelEntry | None:
        entry = machine.find(name, 5)
        machine.contents[name] = 1  # just after it was found
        return entry

    registry.find = find
    async with registry.use("run@1") as old:
        assert (old.entry.stamp, old.lm.content) == (0, 1)
        assert await answer(registry, "run@1") == 1
        assert await answer(registry, "run@1") == 1
    assert machine.loads["run@1"] == 2
    await registry.close_all()
    assert not machine.models


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("smollm2-135m-instruct:poet", "SmolLM2-135M-Instruct.Q4:poet"),
        ("smollm2-135m:poet", "SmolLM2-135M-Instruct.Q4:poet"),
        ("SmolLM2:Poet", "SmolLM2-135M-Instruct.Q4:poet"),
        ("smollm2:poet:latest", "SmolLM2-135M-Instruct.Q4:poet"),
        ("smollm2:clerk", None),
        ("qwen3:poet", None),  # adapters belong to the first model
        ("smol:poet", None),
        (":poet", None),
        ("poet", None),
        ("smollm2:", None),
        ("smollm2", "SmolLM2-135M-Instruct.Q4"),
    ],
)
def test_adapters_have_short_names_as_models_do(tmp_path: Path, name: str, meaning: str | None):
    write_adapter(tmp_path / "poet", "poems")
    machine = Machine(room=10)
    entries = [machine.entry("SmolLM2-135M-Instruct.Q4", 1), machine.entry("Qwen3-0.6B", 1)]
    registry = ModelRegistry(entries, model_memory=10, adapters=AdapterFolder(tmp_path))
    if meaning is not None:
        assert registry.entry(name).name == meaning
        return
    with pytest.raises(ApiError, match="no such model") as refusal:
        registry.entry(name)
    assert refusal.value.status == 404


# -- waiting: fair, bounded, cancellable -------------------------------------------------------


@pytest.mark.parametrize("holds", [False, True])
@in_event_loop
async def test_a_steady_stream_for_one_model_starves_no_other(holds: bool):
    """Only the model of the stream can make room: it drains, not the one that is held."""
    machine = Machine(room=10 if holds else 5)
    registry = machine.registry(a=5, b=5, c=5)
    is_over = False

    async def stream() -> None:
        while not is_over:
            await answer(registry, "b", 0.002)

    async with contextlib.AsyncExitStack() as stack:
        holder = await stack.enter_async_context(registry.use("a")) if holds else None
        streams = [asyncio.ensure_future(stream()) for _ in range(3)]
        await until(lambda: "b" in registry.loaded and registry.loaded["b"].users == 3)
        async with registry.use("c", beside=holder) as served:
            assert served.lm.content == 0
        is_over = True
    await asyncio.gather(*streams)
    await registry.close_all()


@in_event_loop
async def test_an_error_in_loading_reaches_all_who_wait_and_the_next_may_try_again():
    machine = Machine(room=10, delay=0.01, broken={"b"})
    registry = machine.registry(a=7, b=7)
    waiting = [answer(registry, name) for name in "abba"]
    result = await asyncio.gather(*waiting, return_exceptions=True)
    assert result[0] == result[3] == 0
    assert all("b is damaged" in str(error) for error in result[1:3]) and machine.loads["b"] == 1
    machine.broken.clear()
    assert await answer(registry, "b") == 0
    await registry.close_all()


@in_event_loop
async def test_who_gives_up_makes_way_for_those_behind():
    machine = Machine(room=10)
    registry = machine.registry(a=7, b=7)
    async with registry.use("a"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await answer(registry, "b")
        assert await answer(registry, "a") == 0  # it need not drain any more
    assert not registry.is_loading("b") and machine.loads == {"a": 1}
    await registry.close_all()


@in_event_loop
async def test_a_second_model_for_one_request_never_deadlocks():
    """Requests that hold a model and ask for another: refused where waiting cannot help."""
    machine = Machine(room=10, delay=0.005)
    entries = [machine.entry(name, size) for name, size in zip("abcd", (5, 5, 5, 7), strict=True)]
    registry = ModelRegistry(entries, model_memory=10)

    async def nested(first: str, second: str, together: asyncio.Barrier) -> Any:
        async with registry.use(first) as holder:
            await together.wait()
            async with registry.use(second, beside=holder) as served:
                return served.lm.content

    # Both models are held, and both requests want a third: one fails, the other is answered.
    together = asyncio.Barrier(2)
    crossed = [nested("a", "c", together), nested("b", "c", together)]
    result = await asyncio.gather(*crossed, return_exceptions=True)
    assert sorted(isinstance(item, ApiError) for item in result) == [False, True]
    (error,) = (item for item in result if isinstance(item, ApiError))
    assert error.status == 503
    with pytest.raises(ApiError, match="d and a do not fit together") as refusal:
        await nested("a", "d", asyncio.Barrier(1))
    assert refusal.value.status == 400
    # The same model once more is there already, also while others wait for it to leave.
    async with registry.use("a") as holder:
        other = asyncio.ensure_future(answer(registry, "d"))
        await until(lambda: registry.is_loading("d"))
        async with registry.use("a", beside=holder) as again:
            assert again is holder
    await other
    await registry.close_all()


@in_event_loop
async def test_a_request_never_waits_for_the_model_that_it_holds_itself():
    """The old version in its hands counts as memory, and only an idle model can make room."""
    machine = Machine(room=10)
    registry = machine.registry(checkpoint=4, c=3, b=5)
    await answer(registry, "c")
    async with registry.use("run@1") as old:
        machine.contents["run@1"] = 1
        async with registry.use("run@1", beside=old) as new:
            assert (old.lm.content, new.lm.content) == (0, 1)
            assert "c" not in registry.loaded
    await registry.close_all()
    assert machine.peak <= 10


@in_event_loop
async def test_an_idle_model_makes_room_before_an_old_version_in_use():
    machine = Machine(room=12)
    registry = machine.registry(checkpoint=4, c=3, b=5)
    async with registry.use("run@1"):
        machine.contents["run@1"] = 1
        await answer(registry, "run@1")
        assert await answer(registry, "b") == 0  # while the old version is in use
    await registry.close_all()
    assert machine.peak <= 12


@in_event_loop
async def test_a_server_that_stops_fails_those_who_wait():
    machine = Machine(room=10, delay=0.02)
    registry = machine.registry(a=7, b=7)
    waiting = [asyncio.ensure_future(answer(registry, name)) for name in "ab"]
    await until(lambda: machine.models)
    await registry.close_all()
    result = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(item, ApiError) and item.status == 503 for item in result)
    await until(lambda: not machine.models)  # also what was still being loaded


# -- anything, in any order --------------------------------------------------------------------

SIZES = {"a": 6, "b": 5, "c": 3, "run@1": 4, "run@2": 2}
ROOM = 10
NAMES = [*SIZES, "a:poet", "a:clerk"]


class Visitors:
    """Requests of all kinds; each knows the least content that may answer it."""

    def __init__(self, folder: Path, delay: float) -> None:
        self.folder, self.written = folder, Counter[str]()
        self.machine = Machine(room=ROOM, delay=delay)
        for name in ("poet", "clerk"):
            self.adapt(name)
        listed = [self.machine.entry(name, SIZES[name]) for name in "abc"]
        self.registry = ModelRegistry(listed, model_memory=ROOM, adapters=AdapterFolder(folder))
        self.registry.find = self.find
        self.tasks: list[asyncio.Task[Any]] = []

    def find(self, name: str) -> ModelEntry | None:
        return self.machine.find(name, SIZES[name]) if name.startswith("run@") else None

    def adapt(self, name: str) -> None:
        self.written[name] += 1
        write_adapter(self.folder / name, str(self.written[name]))

    async def request(
        self, name: str, second: str | None, seconds: float, beside: Any = None
    ) -> None:
        adapter = name.partition(":")[2]
        least = self.written[adapter] if adapter else self.machine.contents[name]
        async with self.registry.use(name, beside=beside) as served:
            model = getattr(served.lm, "base", served.lm)
            content = int(served.lm.content)
            assert content >= least, f"{name} is stale"
            assert not model.is_closed
            if second is not None:
                await self.request(second, None, seconds, beside=served)
            await asyncio.sleep(seconds)
            assert not model.is_closed, f"{name} was closed while in use"

    def begin(self, name: str, second: str | None, seconds: float, cancel: float | None) -> None:
        task = asyncio.ensure_future(self.request(name, second, seconds))
        self.tasks.append(task)
        if cancel is not None:
            asyncio.get_running_loop().call_later(cancel, task.cancel)

    async def end(self) -> None:
        """All requests are answered, or told why not; then nothing is left."""
        for outcome in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(outcome, ApiError):
                assert (
                    "do not fit together" in outcome.message
                    or "not enough memory" in outcome.message
                )
            elif isinstance(outcome, RuntimeError):
                assert "is damaged" in str(outcome)
            else:
                assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        assert self.machine.peak <= ROOM
        assert not self.registry._tickets and not self.registry._retired
        assert not any(served.users for served in self.registry.loaded.values())
        self.machine.broken.clear()
        for name in NAMES:  # nothing is stuck
            await self.request(name, None, 0.0)
        await self.registry.close_all()
        assert not self.machine.models


def play(visitors: Visitors, draw: random.Random) -> None:
    """One event: mostly a request, sometimes a change to what is there."""
    machine, kind = visitors.machine, draw.random()
    if kind < 0.6:
        second = draw.choice([None, None, draw.choice(NAMES)])
        cancel = draw.choice([None, None, draw.randint(0, 4) / 1000])
        visitors.begin(draw.choice(NAMES), second, draw.randint(0, 4) / 1000, cancel)
    elif kind < 0.75:
        machine.contents[draw.choice(["run@1", "run@2"])] += 1
    elif kind < 0.8:
        visitors.adapt(draw.choice(["poet", "clerk"]))
    elif kind < 0.85:
        visitors.registry.unload(draw.choice(NAMES))
    elif kind < 0.9:
        machine.broken.add(draw.choice(list(SIZES)))
    else:
        machine.broken.clear()


@pytest.mark.parametrize("limit", [1, 8])
def test_whatever_is_asked_in_whatever_order(tmp_path, limit, monkeypatch):
    monkeypatch.setattr(registries, "MAX_EPHEMERAL", limit)

    async def check(seed: int) -> None:
        draw = random.Random(seed)
        visitors = Visitors(tmp_path / str(seed), draw.choice([0.0, 0.001]))
        idle = asyncio.ensure_future(visitors.registry.close_idle())
        for _ in range(draw.randint(20, 60)):
            await asyncio.sleep(draw.randint(0, 4) / 1000)
            play(visitors, draw)
        await visitors.end()
        idle.cancel()

    for seed in range(8):
        asyncio.run(asyncio.wait_for(check(seed), 60))
