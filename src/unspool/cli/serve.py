"""`unspool serve`: the engine behind HTTP, for every program that knows OpenAI's API."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from unspool.cli import options as o
from unspool.cli.starting import Starting
from unspool.errors import SettingsError, UnspoolError
from unspool.gc_pause import gc_paused

_LIMITS, _OPERATION, _REPLICAS = "Limits", "Operation", r"Replicas (pip install 'unspool\[ray]')"
_WARNING = (
    "anyone who can reach {host} can use this server, and there is no key; "
    "give --api-key-file, or keep --host 127.0.0.1"
)


@o.several_models_options
@gc_paused()
def serve(
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="On which port; 0: any free one.")] = 8000,
    adapters: Annotated[
        Path | None,
        typer.Option(help="A folder of LoRA adapters, asked for as MODEL:ADAPTER."),
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must give. Several times.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file of keys, one a line; not seen in a process list.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may ask; * for all.")
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(help="Texts written at once; 64, on a GPU 256.", rich_help_panel=_LIMITS),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Requests that may wait; more get 429.", rich_help_panel=_LIMITS)
    ] = 256,
    max_choices: Annotated[
        int, typer.Option(help="The largest n and best_of.", rich_help_panel=_LIMITS)
    ] = 16,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer.", rich_help_panel=_LIMITS)
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option(help="Tokens of a prompt.", rich_help_panel=_LIMITS)
    ] = None,
    max_think: Annotated[
        int,
        typer.Option(help="Tokens a search (unspool.think) may compute.", rich_help_panel=_LIMITS),
    ] = 32_768,
    max_body: Annotated[int, typer.Option(help="Bytes of a request.", rich_help_panel=_LIMITS)] = 4
    << 20,
    max_branches: Annotated[
        int, typer.Option(help="Branches kept in /v1/tree.", rich_help_panel=_LIMITS)
    ] = 1000,
    deadline: Annotated[
        float, typer.Option(help="Seconds for a request.", rich_help_panel=_LIMITS)
    ] = 600.0,
    write_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds before a client that reads nothing is dropped.", rich_help_panel=_LIMITS
        ),
    ] = 60.0,
    drain: Annotated[
        float,
        typer.Option(
            help="Seconds to finish what runs, once asked to stop.", rich_help_panel=_OPERATION
        ),
    ] = 30.0,
    cache_memory: Annotated[
        int | None,
        typer.Option(
            help="Bytes for keys and values of a model, and for recurrent states; by default a "
            "share of what is free.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    model_memory: Annotated[
        int | None,
        typer.Option(
            help="Bytes for the weights of all models; what is not in use makes room. "
            "Default: four fifths of what is free.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    unload_after: Annotated[
        float | None,
        typer.Option(help="Seconds after which an unused model goes.", rich_help_panel=_OPERATION),
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
            "--log-prompts", help="Put prompts and texts into the log.", rich_help_panel=_OPERATION
        ),
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Where training runs lie. Default: UNSPOOL_RUNS, or ./runs.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Serve with so many replicas, each with its share of the cores, under Ray.",
            rich_help_panel=_REPLICAS,
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            help="Start more, up to so many, while requests wait.", rich_help_panel=_REPLICAS
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            help="Cores that each replica keeps to; by default its share of all.",
            rich_help_panel=_REPLICAS,
        ),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(
            help="prefix: to the replica that holds most of a prompt; or round-robin.",
            rich_help_panel=_REPLICAS,
        ),
    ] = "prefix",
    *,
    chosen: list[o.ModelChoice],
) -> None:
    """Serve a model over HTTP: OpenAI's API, Anthropic's messages, the tree of tokens, the page.

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
    if log_level not in ("debug", "info", "warning", "error"):
        raise SettingsError(f"--log-level is {log_level!r}; debug, info, warning or error")
    if log_format not in ("auto", "json", "text"):
        raise SettingsError(f"--log-format is {log_format!r}; it may be json, text or auto")
    keys = [*(api_key or ()), *_keys_in(api_key_file), *_keys_in_environment()]
    from unspool.server.http.logs import configure_logging
    from unspool.server.http.settings import ServerSettings
    from unspool.server.http.sockets import bind_socket

    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=tuple(keys),
        cors=tuple(cors or ()),
        max_running=_most_running(chosen) if max_running is None else max_running,
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
        runs=runs,
    )
    if adapters is not None and not adapters.is_dir():
        raise SettingsError(f"--adapters is {adapters}, and there is no such folder")
    _check_sizes(
        cache_memory=cache_memory,
        model_memory=model_memory,
        unload_after=unload_after,
        replicas=replicas,
        cores=cores,
    )
    if replicas is None and (max_replicas or cores):
        raise SettingsError("--max-replicas and --cores are of replicas; give --replicas too")
    bound = bind_socket(settings)
    log = (
        log_level,
        log_format == "json" or not (log_format == "text" or sys.stderr.isatty()),
    )
    starting = Starting(chosen, cache_memory) if replicas is None else None
    configure_logging(*log)

    def started(address: str, names: list[str]) -> None:
        if sys.stderr.isatty():
            o.say(f"{', '.join(names)} at {address} · {address}/docs · Ctrl-C stops")

    if not settings.is_local and not keys:
        o.say(_WARNING.format(host=host))
    if starting is None:
        from unspool.cli.replicas import serve_replicas

        serve_replicas(
            chosen,
            settings,
            bound,
            started,
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
    starting.run(
        settings,
        bound,
        started,
        model_memory=model_memory,
        unload_after=unload_after,
        adapters=adapters,
    )


def _most_running(chosen: list[o.ModelChoice]) -> int:
    """A GPU reads its weights once for as many texts as there are."""
    return 256 if any(choice.device() != "cpu" for choice in chosen) else 64


def _check_sizes(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not value > 0:
            raise SettingsError(f"--{name.replace('_', '-')} is {value}; it must be above 0")


def _keys_in(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnspoolError(f"{file}: cannot be read as a file of keys ({error})") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise UnspoolError(f"{file}: holds no key; put one on each line")
    return keys


def _keys_in_environment() -> list[str]:
    key = os.environ.get("UNSPOOL_API_KEY", "")
    return [key] if key else []
