"""`unspool page`: the model at work, in a browser."""

from __future__ import annotations

import socket
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from unspool.cli import options as o
from unspool.cli.starting import Starting
from unspool.errors import UnspoolError
from unspool.gc_pause import gc_paused

_PORT = 8000


@o.several_models_options
@gc_paused()
def page(
    port: Annotated[
        int | None, typer.Option(help="On which port; 0: any free one. Default: 8000, if free.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.")
    ] = True,
    runs: Annotated[
        Path | None,
        typer.Option(help="Where training runs lie. Default: UNSPOOL_RUNS, or ./runs."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Open this training run, with its own model.")
    ] = None,
    *,
    chosen: list[o.ModelChoice],
) -> None:
    """Open the page: watch a model write, see each step, take the pen.

    It is what [b]unspool serve[/b] serves at its address, for this machine only, opened at once.

    [b]Examples[/b]

      unspool page
      unspool page --model qwen.gguf
      unspool page --no-open --port 9000
      unspool page --run runs/speeches
    """
    from unspool.server.http.logs import configure_logging
    from unspool.server.http.settings import ServerSettings
    from unspool.server.http.sockets import bind_socket

    start = ""
    if run is not None:
        runs, start, chosen = _opened(run, runs, chosen)
    if runs is not None and not runs.is_dir():
        raise UnspoolError(f"--runs {runs}: there is no such folder")
    settings = ServerSettings(port=_usual_port() if port is None else port, drain=2.0, runs=runs)
    bound = bind_socket(settings)
    starting = Starting(chosen)
    configure_logging("warning", as_json=False)

    def started(address: str, names: list[str]) -> None:
        address += start
        o.say(f"{', '.join(names)} writes at {address} · Ctrl-C stops")
        if browser and not webbrowser.open(address):
            o.say(f"no browser was found here; open {address} in yours")

    starting.run(settings, bound, started, others=True)


def _opened(
    folder: Path, runs: Path | None, chosen: list[o.ModelChoice]
) -> tuple[Path, str, list[o.ModelChoice]]:
    """Where a run's neighbours lie, its place on the page, and the model: its own, unless another
    is wanted or there is none yet."""
    from unspool.train.running.runs import Run

    found = Run.open(folder if runs is None or folder.exists() else runs / folder)
    model = found.model
    if model is not None and chosen[0].model is None:
        chosen = [replace(chosen[0], model=f"{found.name}={model}")]
    return found.folder.absolute().parent, f"/?run={quote(found.name)}", chosen


def _usual_port() -> int:
    """8000, or any other if somebody has it: the page finds its server by itself."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", _PORT))
        except OSError:
            return 0
    return _PORT
