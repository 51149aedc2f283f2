"""The command line: `unspool "a prompt"`, and the commands beside it."""

from unspool.cli.main import main

__all__ = ["main"]
