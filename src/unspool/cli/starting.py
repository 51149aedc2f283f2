"""Starting a server from the command line: models found, and loading before the rest is there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from unspool.cli import options as o

if TYPE_CHECKING:
    from concurrent.futures import Future

    from unspool.lm import LanguageModel
    from unspool.serve.http.settings import ServeSettings


@contextmanager
def collecting_later() -> Iterator[None]:
    """No garbage collection until the server stands: what is made meanwhile stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Starting:
    """Models that are here; the first loads already, while the web framework is imported."""

    def __init__(self, chosen: list[o.ModelChoice], memory: int | None = None) -> None:
        self._found = [_found(model, memory) for model in chosen]
        self._ahead = _Ahead(self._found[0].choice)

    def run(
        self,
        settings: ServeSettings,
        started: Callable[[str, list[str]], None],
        *,
        model_memory: int | None = None,
        unload_after: float | None = None,
    ) -> None:
        """Serve until asked to stop; `started` is called with the address and the models."""
        from unspool.serve.core.registry import ModelEntry, ModelRegistry
        from unspool.serve.http import server
        from unspool.serve.http.app import create_app
        from unspool.serve.http.logs import tell

        bound = server.listening(settings)
        loads = [self._ahead.load, *(model.choice.load for model in self._found[1:])]
        entries = [
            ModelEntry(model.name, load, model.size)
            for model, load in zip(self._found, loads, strict=True)
        ]
        registry = ModelRegistry(entries, room=model_memory or _most_room(), idle=unload_after)
        app, state = create_app(settings, registry)

        def stopping() -> None:
            state.admission.refusing = True
            tell("stopping", running=state.admission.running, queued=state.admission.queued)

        def stands(address: str) -> None:
            gc.freeze()  # so that later collections need not look at it
            gc.enable()
            names = list(registry.entries)
            tell("started", address=address, models=names, keys=len(settings.api_keys))
            started(address, names)

        server.run(app, settings, bound, stopping=stopping, started=stands)


@dataclass(frozen=True, slots=True)
class _Found:
    """A model that is here, ready to be loaded."""

    name: str
    choice: o.ModelChoice
    size: int


class _Ahead:
    """A model whose loading has begun already."""

    def __init__(self, choice: o.ModelChoice) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._choice = choice
        self._begun: Future[LanguageModel] | None = ThreadPoolExecutor(1).submit(self._load)

    def _load(self) -> LanguageModel:
        lm = self._choice.load()
        lm.writers  # noqa: B018  which starts the engine
        return lm

    def load(self) -> LanguageModel:
        """What was begun; when that is gone, the model once more."""
        begun, self._begun = self._begun, None
        return begun.result() if begun is not None else self._choice.load()


def _found(chosen: o.ModelChoice, memory: int | None) -> _Found:
    """`NAME=PATH`, or a path or repo id that gives the name; checked before anything is loaded."""
    from unspool.model.hub import find_model

    given = chosen.model or ""
    name, _, where = given.rpartition("=")
    offline = bool(chosen.options.get("offline"))
    path = find_model(where or None, offline=offline)
    chosen = replace(chosen, model=str(path), options={**chosen.options, "memory": memory})
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return _Found(name or path.stem, chosen, sum(file.stat().st_size for file in files))


def _most_room() -> int:
    from unspool.backends.memory import free_memory

    return free_memory() * 4 // 5
