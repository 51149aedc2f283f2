"""`unspool page`: the model at work, in a browser."""

from __future__ import annotations

import socket
import webbrowser
from typing import Annotated

import typer

from unspool.cli import options as o
from unspool.cli.starting import Starting
from unspool.collecting import collecting_later

_PORT = 8000


@o.several_models_options
@collecting_later()
def page(
    port: Annotated[
        int | None, typer.Option(help="On which port; 0: any free one. Default: 8000, if free.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.")
    ] = True,
    *,
    chosen: list[o.ModelChoice],
) -> None:
    """Open the page: watch a model write, see each step, take the pen.

    It is what [b]unspool serve[/b] serves at its address, for this machine only, opened at once.

    [b]Examples[/b]

      unspool page
      unspool page --model qwen.gguf
      unspool page --no-open --port 9000
    """
    from unspool.serve.http.listening import bound_socket
    from unspool.serve.http.logs import set_up
    from unspool.serve.http.settings import ServeSettings

    settings = ServeSettings(port=_usual_port() if port is None else port, drain=2.0)
    bound = bound_socket(settings)
    starting = Starting(chosen)
    set_up("warning", as_json=False)

    def started(address: str, names: list[str]) -> None:
        o.say(f"{', '.join(names)} writes at {address} · Ctrl-C stops")
        if browser and not webbrowser.open(address):
            o.say(f"no browser was found here; open {address} in yours")

    starting.run(settings, bound, started, others=True)


def _usual_port() -> int:
    """8000, or any other if somebody has it: the page finds its server by itself."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", _PORT))
        except OSError:
            return 0
    return _PORT
