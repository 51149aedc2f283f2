"""`unspool completion`: the script that completes commands, options and model names in a shell."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Shell(StrEnum):
    """A shell with completion."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"
    powershell = "powershell"


def completion(shell: Annotated[Shell, typer.Argument(help="Your shell.")]) -> None:
    """Print the completion script of a shell. `unspool --install-completion` installs it.

    [b]Examples[/b]

      unspool completion bash >> ~/.bashrc
      unspool completion zsh >> ~/.zshrc
      unspool completion fish > ~/.config/fish/completions/unspool.fish
    """
    from typer._completion_shared import get_completion_script

    print(
        get_completion_script(
            prog_name="unspool", complete_var="_UNSPOOL_COMPLETE", shell=shell.value
        )
    )
