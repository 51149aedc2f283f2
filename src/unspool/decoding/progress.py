"""A bar for work that takes more than a moment, where a person looks: a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

_SOON = 1.0  # seconds after which a person wonders
_BETWEEN = 0.2  # ... and from one change in a notebook to the next

Tell = Callable[[int], object]


@contextmanager
def progress_bar(label: str, total: int, *, show: bool = True) -> Iterator[Tell]:
    """Something to tell how much is done; it shows once a second has passed, and nothing before."""
    make = (_in_notebook() or _in_terminal()) if show else None
    started = monotonic()
    with ExitStack() as shown:
        bar: list[Tell] = []

        def tell(done: int) -> None:
            if make is not None and not bar and monotonic() - started > _SOON:
                bar.append(shown.enter_context(make(label, total)))
            if bar:
                bar[0](done)

        yield tell


def _in_terminal() -> Any:
    return _terminal_bar if sys.stderr.isatty() else None


@contextmanager
def _terminal_bar(label: str, total: int) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


def _in_notebook() -> Any:
    running = sys.modules.get("IPython")
    shell = running.get_ipython() if running is not None else None
    return _notebook_bar if type(shell).__name__ == "ZMQInteractiveShell" else None


@contextmanager
def _notebook_bar(label: str, total: int) -> Iterator[Tell]:
    from IPython.display import HTML, display

    started = monotonic()
    changed, known = started, 0

    def picture() -> Any:
        words = f"{label} {known} of {total} · {monotonic() - started + _SOON:.0f} s"
        return HTML(f"<progress max='{total}' value='{known}'></progress> {words}")

    handle: Any = display(picture(), display_id=True)

    def tell(done: int) -> None:
        nonlocal changed, known
        known, now = done, monotonic()
        if now - changed > _BETWEEN:
            changed = now
            handle.update(picture())

    try:
        yield tell
    finally:
        handle.update(picture())
