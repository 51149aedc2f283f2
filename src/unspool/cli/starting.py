"""Starting a server from the command line: models found, and loading before the rest is there."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from unspool.cli import options as o
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    import socket
    from concurrent.futures import Future

    from unspool.lm import LanguageModel
    from unspool.server.http.settings import ServerSettings
    from unspool.server.runtime.registry import ModelEntry


class Starting:
    """Models that are here, or on their way; the first is loaded, and the default model fetched,
    while the web framework is imported."""

    def __init__(self, chosen: list[o.ModelChoice], memory: int | None = None) -> None:
        for model in chosen:
            model.check()
        self._located = [_located(model, memory) for model in chosen]
        self._preload = _Preload(self._located[0].choice)

    def run(
        self,
        settings: ServerSettings,
        bound: socket.socket,
        started: Callable[[str, list[str]], None],
        *,
        model_memory: int | None = None,
        unload_after: float | None = None,
        others: bool = False,
        adapters: Path | None = None,
    ) -> None:
        """Serve until asked to stop; `started` is called with the address and the models. With
        `others`, whatever models are on this machine can be asked for too; `adapters` is a folder
        of those that the first model can be asked for with."""
        from unspool.server.app import create_app
        from unspool.server.http import server
        from unspool.server.http.logs import log_event
        from unspool.server.runtime.registry import AdapterFolder, ModelEntry, ModelRegistry

        def give_up(reason: str) -> None:
            state.startup_error = UnspoolError(reason)
            os.kill(os.getpid(), signal.SIGTERM)

        loads = [self._preload.load, *(model.choice.load for model in self._located[1:])]
        entries = [
            ModelEntry(model.name, _watched(load, give_up), model.size)
            for model, load in zip(self._located, loads, strict=True)
        ]
        registry = ModelRegistry(
            entries,
            model_memory=model_memory or _model_memory(),
            keep_alive=unload_after,
            adapters=AdapterFolder(adapters) if adapters is not None else None,
        )
        app, state = create_app(settings, registry)

        def stopping() -> None:
            state.admission.is_stopping = True
            log_event("stopping", running=state.admission.running, queued=state.admission.queued)

        def on_started(address: str) -> bool:
            if state.startup_error is not None:
                return False
            gc.freeze()  # so that later collections need not look at it
            gc.enable()
            names = [*registry.entries, *registry.adapters()]
            log_event("started", address=address, models=names, keys=len(settings.api_keys))
            started(address, names)
            if others:  # looking for them takes a moment, and nobody waits for it
                Thread(target=lambda: registry.add(self._others()), daemon=True).start()
            return True

        server.run(app, settings, bound, on_stopping=stopping, on_started=on_started)
        if state.startup_error is not None:
            raise state.startup_error

    def _others(self) -> list[ModelEntry]:
        """The models on this machine that were not chosen; loaded when somebody picks one. Those
        that came with Unspool are in no list: they solve puzzles, and the page asks for them by
        name where it shows one."""
        from unspool.model.hub.find import cached_models
        from unspool.server.runtime.registry import ModelEntry

        options = self._located[0].choice.options
        chosen = [Path(model.choice.model or "") for model in self._located]
        inside = {folder for path in chosen for folder in (path, path.resolve(), *path.parents)}
        try:
            found = [
                each
                for each in cached_models()
                if each.path not in inside and each.source != "shipped"
            ]
        except Exception as error:  # a damaged store is no reason not to start
            o.say(f"the models on this machine could not be looked through: {error}")
            return []
        return [
            ModelEntry(
                each.name,
                o.ModelChoice(str(each.path), options).load,
                each.bytes,
                getattr(each, "source", ""),
            )
            for each in found
        ]


@dataclass(frozen=True, slots=True)
class _LocatedModel:
    """A model that is here, ready to be loaded."""

    name: str
    choice: o.ModelChoice
    size: int


class _Preload:
    """A model whose loading has begun already."""

    def __init__(self, choice: o.ModelChoice) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._choice = choice
        self._future: Future[LanguageModel] | None = ThreadPoolExecutor(1).submit(self._load)

    def _load(self) -> LanguageModel:
        lm = self._choice.load()
        lm.engine  # noqa: B018  which starts the engine
        return lm

    def load(self) -> LanguageModel:
        """What was begun; when that is gone, the model once more."""
        future, self._future = self._future, None
        return future.result() if future is not None else self._choice.load()


def _watched(
    load: Callable[[], LanguageModel], give_up: Callable[[str], None]
) -> Callable[[], LanguageModel]:
    """`load` for a server: a model whose other processes are gone can serve nobody any more."""

    def loaded() -> LanguageModel:
        lm = load()
        ranks = getattr(lm.model, "ranks", None)
        if ranks is not None:
            ranks.on_failure.append(give_up)
        return lm

    return loaded


def _located(chosen: o.ModelChoice, memory: int | None) -> _LocatedModel:
    """`NAME=PATH`, or a path or repo id that gives the name; checked before anything is loaded.

    The default model is known without being here: it is fetched when it is loaded.
    """
    from unspool.model.hub.locate import locate

    found = locate(chosen.model, offline=bool(chosen.options.get("offline")))
    chosen = replace(chosen, model=found.path, options={**chosen.options, "memory": memory})
    return _LocatedModel(found.name, chosen, found.size)


def _model_memory() -> int:
    from unspool.backends.step import free_memory

    return free_memory() * 4 // 5
