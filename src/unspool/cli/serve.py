"""`unspool serve` and `unspool page`: the HTTP server, and the web page for this machine."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.cli.output import say
from unspool.errors import SettingsError, UnspoolError
from unspool.features import load_option_handler
from unspool.gc_pause import gc_paused
from unspool.store.folder import PAGES_BYTES

if TYPE_CHECKING:
    from concurrent.futures import Future

    from unspool.lm import LanguageModel
    from unspool.server.http.settings import ServerSettings
    from unspool.server.runtime.registry import ModelEntry

_LIMITS, _OPERATION, _REPLICAS = "Limits", "Operation", r"Replicas (pip install 'unspool\[ray]')"
_PAGE_PORT = 8000
_STATE_SIZE_HELP = "Bytes for saved KV-cache pages in that folder; texts are always kept."
_SAE_HELP = "Folder of a sparse autoencoder of the first model, for the page. Repeatable."
_RUNS_HELP = "Folder of training runs. Default: UNSPOOL_RUNS, or ./runs."


@o.several_models_options
@gc_paused()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 8000,
    adapters: Annotated[
        Path | None,
        typer.Option(help="Folder of LoRA adapters, requested as MODEL:ADAPTER."),
    ] = None,
    steering_vectors: Annotated[
        Path | None,
        typer.Option(help="Folder of GGUF control vectors, which requests name under steer."),
    ] = None,
    sae: Annotated[list[Path] | None, typer.Option(help=_SAE_HELP)] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="API key that clients must send. Repeatable.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of API keys, one per line; not visible in the process list."),
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Allowed CORS origin; * for all. Repeatable.")
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(
            help="Maximum running sequences. Default: 64, on a GPU 256.", rich_help_panel=_LIMITS
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(help="Maximum waiting requests; others get 429.", rich_help_panel=_LIMITS),
    ] = 256,
    max_choices: Annotated[
        int, typer.Option(help="Maximum n and best_of of a request.", rich_help_panel=_LIMITS)
    ] = 16,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens of an answer.", rich_help_panel=_LIMITS)
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option(help="Maximum tokens of a prompt.", rich_help_panel=_LIMITS)
    ] = None,
    max_think: Annotated[
        int,
        typer.Option(help="Maximum tokens of a search (unspool.think).", rich_help_panel=_LIMITS),
    ] = 32_768,
    max_body: Annotated[
        int, typer.Option(help="Maximum bytes of a request.", rich_help_panel=_LIMITS)
    ] = 4 << 20,
    max_branches: Annotated[
        int, typer.Option(help="Maximum branches in /v1/tree.", rich_help_panel=_LIMITS)
    ] = 1000,
    deadline: Annotated[
        float, typer.Option(help="Maximum seconds of a request.", rich_help_panel=_LIMITS)
    ] = 600.0,
    write_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds until a client that reads nothing is dropped.", rich_help_panel=_LIMITS
        ),
    ] = 60.0,
    drain: Annotated[
        float,
        typer.Option(
            help="Seconds to finish running requests at shutdown.", rich_help_panel=_OPERATION
        ),
    ] = 30.0,
    cache_memory: Annotated[
        int | None,
        typer.Option(
            help="Bytes for the KV cache and recurrent states of a model. Default: a share of free "
            "memory.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    model_memory: Annotated[
        int | None,
        typer.Option(
            help="Bytes for the weights of all models; unused models are unloaded to stay below. "
            "Default: 80 % of free memory.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    unload_after: Annotated[
        float | None,
        typer.Option(
            help="Unload a model unused for this many seconds.", rich_help_panel=_OPERATION
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_OPERATION)
    ] = "info",
    log_format: Annotated[
        str,
        typer.Option(help="json, text, or auto: text on a terminal.", rich_help_panel=_OPERATION),
    ] = "auto",
    log_prompts: Annotated[
        bool,
        typer.Option(
            "--log-prompts", help="Log prompts and generated text.", rich_help_panel=_OPERATION
        ),
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the texts of /v1/tree. Default: they are lost with the server.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    state_size: Annotated[
        int, typer.Option(help=_STATE_SIZE_HELP, rich_help_panel=_OPERATION)
    ] = PAGES_BYTES,
    slot_save_path: Annotated[
        Path | None,
        typer.Option(
            help="Folder for llama.cpp's POST /slots/ID?action=save and restore.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    runs: Annotated[Path | None, typer.Option(help=_RUNS_HELP, rich_help_panel=_OPERATION)] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Number of replicas under Ray; they share the cores.", rich_help_panel=_REPLICAS
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            help="Start up to this many replicas while requests wait.", rich_help_panel=_REPLICAS
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(help="Cores per replica. Default: an equal share.", rich_help_panel=_REPLICAS),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(
            help="prefix (the replica with the longest cached prefix) or round-robin.",
            rich_help_panel=_REPLICAS,
        ),
    ] = "prefix",
    *,
    model_choices: list[o.ModelChoice],
) -> None:
    """Serve models over HTTP: OpenAI and Anthropic APIs, the token tree, the page.

    [b]Examples[/b]

      unspool serve
      unspool serve --port 8080 --api-key-file keys.txt
      unspool serve --model qwen=qwen.gguf --model small=smollm.gguf
      unspool serve --adapters adapters/
      unspool serve --max-running 16 --max-queue 64 --max-tokens 1024
      unspool serve --replicas 2
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Why do leaves change color in fall?"}]}'
    """
    _check_one_of("--log-level", log_level, ("debug", "info", "warning", "error"))
    _check_one_of("--log-format", log_format, ("json", "text", "auto"))
    keys = [*(api_key or ()), *_read_keys(api_key_file)]
    if environment_key := os.environ.get("UNSPOOL_API_KEY"):
        keys.append(environment_key)
    from unspool.server.http.logs import configure_logging
    from unspool.server.http.settings import ServerSettings
    from unspool.server.http.sockets import bind_socket

    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=tuple(keys),
        cors=tuple(cors or ()),
        max_running=_default_max_running(model_choices) if max_running is None else max_running,
        max_queued=max_queue,
        max_choices=max_choices,
        max_tokens=max_tokens,
        max_think=max_think,
        max_prompt=max_prompt,
        max_body=max_body,
        max_branches=max_branches,
        deadline=deadline,
        drain=drain,
        write_seconds=write_timeout,
        log_prompts=log_prompts,
        state=state,
        state_bytes=state_size,
        slots=slot_save_path,
        runs=runs,
    )
    if adapters is not None and not adapters.is_dir():
        raise SettingsError(f"--adapters must be a folder, got {adapters}")
    if steering_vectors is not None and not steering_vectors.is_dir():
        raise SettingsError(f"--steering-vectors must be a folder, got {steering_vectors}")
    if steering_vectors is not None and replicas is not None:
        raise SettingsError("--steering-vectors cannot be used with --replicas")
    if sae and replicas is not None:
        raise SettingsError("--sae cannot be used with --replicas")
    _check_positive(
        cache_memory=cache_memory,
        model_memory=model_memory,
        unload_after=unload_after,
        replicas=replicas,
        cores=cores,
    )
    if replicas is not None and (state or slot_save_path):
        raise SettingsError("--state and --slot-save-path cannot be used with --replicas")
    if slot_save_path is not None and not slot_save_path.is_dir():
        raise SettingsError(f"--slot-save-path must be a folder, got {slot_save_path}")
    if replicas is None and (max_replicas or cores):
        raise SettingsError("--max-replicas and --cores need --replicas")
    bound = bind_socket(settings)
    log = (log_level, log_format == "json" or not (log_format == "text" or sys.stderr.isatty()))
    startup = ServerStartup(model_choices, cache_memory) if replicas is None else None
    configure_logging(*log)

    def on_started(address: str, names: list[str]) -> None:
        if sys.stderr.isatty():
            say(f"{', '.join(names)} at {address} · {address}/docs · Ctrl-C stops")

    if not settings.is_local and not keys:
        say(
            f"anyone who can reach {host} can use this server: it has no API key; "
            "set one with --api-key-file, or use --host 127.0.0.1"
        )
    if startup is None:
        load_option_handler("serve --replicas")(
            model_choices,
            settings,
            bound,
            on_started,
            replicas=replicas or 1,
            max_replicas=max_replicas,
            cores=cores,
            routing=routing,
            log=log,
            cache_memory=cache_memory,
            model_memory=model_memory,
            unload_after=unload_after,
            adapters=adapters,
        )
        return
    startup.run(
        settings,
        bound,
        on_started,
        model_memory=model_memory,
        unload_after=unload_after,
        adapters=adapters,
        steering_vectors=steering_vectors,
        autoencoders=sae or (),
    )


@o.several_models_options
@gc_paused()
def page(
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on; 0: any free port. Default: 8000, if free."),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.")
    ] = True,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps your texts. Default: UNSPOOL_STATE, or a data folder."
        ),
    ] = None,
    no_state: Annotated[
        bool, typer.Option("--no-state", help="Keep texts in memory only.")
    ] = False,
    state_size: Annotated[int, typer.Option(help=_STATE_SIZE_HELP)] = PAGES_BYTES,
    runs: Annotated[Path | None, typer.Option(help=_RUNS_HELP)] = None,
    run: Annotated[
        Path | None, typer.Option(help="Open this training run, with its own model.")
    ] = None,
    sae: Annotated[list[Path] | None, typer.Option(help=_SAE_HELP)] = None,
    static: Annotated[
        Path | None,
        typer.Option(help="Write the page as a folder for any file host: no server is needed."),
    ] = None,
    model_url: Annotated[
        str | None,
        typer.Option(help="With --static: load the GGUF file from this address, do not copy it."),
    ] = None,
    *,
    model_choices: list[o.ModelChoice],
) -> None:
    """Open the page: watch a model generate, inspect every step, edit any token.

    It is the page of [b]unspool serve[/b], reachable from this machine only.

    [b]Examples[/b]

      unspool page
      unspool page --model qwen.gguf
      unspool page --no-open --port 9000
      unspool page --run runs/speeches
      unspool page --static site
    """
    if static is not None:
        _write_static_page(static, model_choices[0].model, model_url)
        return
    if model_url is not None:
        raise UnspoolError("--model-url needs --static")
    from unspool.server.http.logs import configure_logging
    from unspool.server.http.settings import ServerSettings
    from unspool.server.http.sockets import bind_socket

    query = ""
    if run is not None:
        runs, query, model = load_option_handler("page --run")(run, runs)
        if model is not None and model_choices[0].model is None:
            model_choices = [replace(model_choices[0], model=model)]
    if runs is not None and not runs.is_dir():
        raise UnspoolError(f"--runs must be a folder, got {runs}")
    settings = ServerSettings(
        port=_free_page_port() if port is None else port,
        drain=2.0,
        runs=runs,
        state=o.state_folder(state, no_state),
        state_bytes=state_size,
    )
    bound = bind_socket(settings)
    startup = ServerStartup(model_choices)
    configure_logging("warning", as_json=False)

    def on_started(address: str, names: list[str]) -> None:
        address += query
        say(f"{', '.join(names)} at {address} · Ctrl-C stops")
        if browser and not webbrowser.open(address):
            say(f"no browser found; open {address} yourself")

    startup.run(settings, bound, on_started, with_local_models=True, autoencoders=sae or ())


def _write_static_page(folder: Path, model: str | None, model_url: str | None) -> None:
    from unspool.model.hub.find import find_model
    from unspool.page.static import write_static

    if model is not None and model_url is not None:
        raise UnspoolError("give either --model or --model-url")
    size, compressed = write_static(folder, model_url or find_model(model))
    sizes = f"{size / 1e6:.2f} MB ({compressed / 1e6:.2f} MB compressed)"
    say(f"{folder}: {sizes} without the model")
    say(f"to try it: python -m http.server -d {folder}")


def _free_page_port() -> int:
    """8000, or 0 (any free port) if it is in use."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", _PAGE_PORT))
        except OSError:
            return 0
    return _PAGE_PORT


# -- checks ----------------------------------------------------------------------------------------


def _default_max_running(model_choices: list[o.ModelChoice]) -> int:
    """A GPU reads its weights once per step for any number of sequences: allow more."""
    return 256 if any(choice.device() != "cpu" for choice in model_choices) else 64


def _check_one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingsError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")


def _check_positive(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not value > 0:
            raise SettingsError(f"--{name.replace('_', '-')} must be > 0, got {value}")


def _read_keys(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnspoolError(f"--api-key-file {file} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise UnspoolError(f"--api-key-file {file} contains no key; put one on each line")
    return keys


# -- startup ---------------------------------------------------------------------------------------


class ServerStartup:
    """Locates the models, and loads the first one while the web framework is imported."""

    def __init__(self, model_choices: list[o.ModelChoice], memory: int | None = None) -> None:
        for choice in model_choices:
            choice.check()
        self._located = [_locate(choice, memory) for choice in model_choices]
        self._preload = _Preload(self._located[0].choice)

    def run(
        self,
        settings: ServerSettings,
        bound: socket.socket,
        on_started: Callable[[str, list[str]], None],
        *,
        model_memory: int | None = None,
        unload_after: float | None = None,
        with_local_models: bool = False,
        adapters: Path | None = None,
        steering_vectors: Path | None = None,
        autoencoders: Sequence[Path] = (),
    ) -> None:
        """Serve until shutdown.

        Args:
            on_started: called with the address and the names of the models.
            with_local_models: also serve the other models on this machine.
            adapters: folder of adapters of the first model.
            steering_vectors: folder of control vectors of the first model.
            autoencoders: folders of sparse autoencoders of the first model.
        """
        from unspool.server.app import create_app
        from unspool.server.http import server
        from unspool.server.http.logs import log_event
        from unspool.server.runtime.registry import AdapterFolder, ModelEntry, ModelRegistry

        def shut_down(reason: str) -> None:
            state.startup_error = UnspoolError(reason)
            os.kill(os.getpid(), signal.SIGTERM)

        def load_first() -> LanguageModel:
            lm = self._preload.load()
            if steering_vectors is not None:
                from unspool.lens.steering import read_vector_folder

                for name, vector in read_vector_folder(steering_vectors).items():
                    lm.load_steering_vector(vector, name)
            for folder in autoencoders:
                lm.add_autoencoder(folder)
            return lm

        loads = [load_first, *(model.choice.load for model in self._located[1:])]
        entries = [
            ModelEntry(model.name, _watch_ranks(load, shut_down), model.size)
            for model, load in zip(self._located, loads, strict=True)
        ]
        registry = ModelRegistry(
            entries,
            model_memory=model_memory or _default_model_memory(),
            keep_alive=unload_after,
            adapters=AdapterFolder(adapters) if adapters is not None else None,
        )
        registry.find_local = self._local_models
        app, state = create_app(settings, registry)

        def on_stopping() -> None:
            state.admission.is_stopping = True
            log_event("stopping", running=state.admission.running, queued=state.admission.queued)

        def on_listening(address: str) -> bool:
            if state.startup_error is not None:
                return False
            gc.freeze()  # so that later collections skip what exists now
            gc.enable()
            names = [*registry.entries, *registry.adapters()]
            log_event("started", address=address, models=names, keys=len(settings.api_keys))
            on_started(address, names)
            if with_local_models:  # in the background: the search takes a moment
                Thread(target=lambda: registry.add(self._local_models()), daemon=True).start()
            return True

        server.run(app, settings, bound, on_stopping=on_stopping, on_started=on_listening)
        if state.startup_error is not None:
            raise state.startup_error

    def _local_models(self) -> list[ModelEntry]:
        """The other models on this machine; loaded on their first request.

        Shipped models are not listed: they solve puzzles, and the page requests them by name.
        """
        from unspool.model.hub.find import cached_models
        from unspool.server.runtime.registry import ModelEntry

        options = self._located[0].choice.options
        paths = [Path(model.choice.model or "") for model in self._located]
        served = {folder for path in paths for folder in (path, path.resolve(), *path.parents)}
        try:
            local = [
                model
                for model in cached_models()
                if model.path not in served and model.source != "shipped"
            ]
        except Exception as error:  # a damaged store must not stop the server
            say(f"cannot list the models on this machine: {error}")
            return []
        return [
            ModelEntry(
                model.name,
                o.ModelChoice(str(model.path), options).load,
                model.bytes,
                getattr(model, "source", ""),
            )
            for model in local
        ]


@dataclass(frozen=True, slots=True)
class _LocatedModel:
    """A model ready to be loaded."""

    name: str
    choice: o.ModelChoice
    size: int


class _Preload:
    """A model that is being loaded in a thread."""

    def __init__(self, choice: o.ModelChoice) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._choice = choice
        self._future: Future[LanguageModel] | None = ThreadPoolExecutor(1).submit(self._load)

    def _load(self) -> LanguageModel:
        lm = self._choice.load()
        lm.engine  # noqa: B018  starts the engine
        return lm

    def load(self) -> LanguageModel:
        """The preloaded model at the first call; later calls load it again."""
        future, self._future = self._future, None
        return future.result() if future is not None else self._choice.load()


def _watch_ranks(
    load: Callable[[], LanguageModel], shut_down: Callable[[str], None]
) -> Callable[[], LanguageModel]:
    """Wrap `load`: if another process of the model dies, shut the server down."""

    def load_and_watch() -> LanguageModel:
        lm = load()
        ranks = getattr(lm.model, "ranks", None)
        if ranks is not None:
            ranks.on_failure.append(shut_down)
        return lm

    return load_and_watch


def _locate(choice: o.ModelChoice, memory: int | None) -> _LocatedModel:
    """Find a model given as `NAME=PATH`, path or repo id, without loading it.

    The default model is downloaded when it is loaded.
    """
    from unspool.model.hub.locate import locate

    location = locate(choice.model, offline=bool(choice.options.get("offline")))
    choice = replace(choice, model=location.path, options={**choice.options, "memory": memory})
    return _LocatedModel(location.name, choice, location.size)


def _default_model_memory() -> int:
    from unspool.backends.step import free_memory

    return free_memory() * 4 // 5
