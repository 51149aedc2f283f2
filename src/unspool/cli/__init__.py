"""The command line: `unspool "a prompt"`, and the commands beside it."""

import os


def main() -> None:
    """Run the command that was typed, and exit.

    Ctrl-C ends it without a word and with 130, also while Python still reads the program's files.
    """
    try:
        from unspool.cli import interrupt

        interrupt.leave_on_signal()
        from unspool.cli.main import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)
