"""Progress bars for a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

_DELAY_S = 1.0  # before the bar appears
_NOTEBOOK_INTERVAL_S = 0.2  # between updates

ProgressCallback = Callable[[int], object]


@contextmanager
def progress_bar(label: str, total: int, *, show: bool = True) -> Iterator[ProgressCallback]:
    """Yield a function that takes the completed amount; the bar appears after one second."""
    make = (_in_notebook() or (_terminal_bar if sys.stderr.isatty() else None)) if show else None
    started = monotonic()
    with ExitStack() as stack:
        bar: list[ProgressCallback] = []

        def tell(done: int) -> None:
            if make is not None and not bar and monotonic() - started > _DELAY_S:
                bar.append(stack.enter_context(make(label, total)))
            if bar:
                bar[0](done)

        yield tell


@contextmanager
def _terminal_bar(label: str, total: int) -> Iterator[ProgressCallback]:
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
def _notebook_bar(label: str, total: int) -> Iterator[ProgressCallback]:
    from IPython.display import HTML, display

    started = monotonic()
    changed, completed = started, 0

    def picture() -> Any:
        words = f"{label} {completed} of {total} · {monotonic() - started + _DELAY_S:.0f} s"
        return HTML(f"<progress max='{total}' value='{completed}'></progress> {words}")

    handle: Any = display(picture(), display_id=True)

    def tell(done: int) -> None:
        nonlocal changed, completed
        completed, now = done, monotonic()
        if now - changed > _NOTEBOOK_INTERVAL_S:
            changed = now
            handle.update(picture())

    try:
        yield tell
    finally:
        handle.update(picture())
