"""`unspool mcp`: a model as an MCP server."""

from __future__ import annotations

from typing import Annotated

import typer

from unspool.cli import options as o
from unspool.cli.output import say
from unspool.errors import UnspoolError


@o.model_options
def mcp(
    http: Annotated[
        bool, typer.Option("--http", help="Serve streamable HTTP at /mcp, not standard input.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on, with --http.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on, with --http.")] = 8001,
    adapter: o.Adapter = None,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Serve a model to MCP clients (Model Context Protocol): generate, chat, score, look.

    A client such as Claude Desktop or VS Code starts this command itself and talks to it over
    standard input and output.

    [b]Examples[/b]

      unspool mcp
      unspool mcp -m qwen3-0.6b
      unspool mcp --http --port 8001
    """
    try:
        from unspool.mcp_server import build_server
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("mcp", "anyio"):
            raise
        raise UnspoolError("mcp is not installed: pip install 'unspool[mcp]'") from None
    lm = o.with_adapter(model_choice.load(), adapter)
    server = build_server(lm)
    if http:
        say(f"MCP server at http://{host}:{port}/mcp")
        server.run("streamable-http", host=host, port=port)
    else:
        server.run("stdio")
