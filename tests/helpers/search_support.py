"""For the tests of thinking: what the backend really computed, and what a search still holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WARM = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}


def levels(root: Any) -> list[list[Any]]:
    """The nodes of a search below the root, level by level."""
    rows, level = [], root.children
    while level:
        rows.append(level)
        level = [child for node in level for child in node.children]
    return rows


class Meter:
    """Counts the tokens that are run while it is on."""

    def __init__(self) -> None:
        self.tokens = 0


@contextmanager
def metered(lm: Any) -> Iterator[Meter]:
    backend, meter = lm.engine.backend, Meter()
    launch = backend.launch

    def counted(batch: Any) -> Any:
        meter.tokens += len(batch.tokens)
        return launch(batch)

    backend.launch = counted
    try:
        yield meter
    finally:
        lm.engine.call(lambda: None)  # wait until running steps are settled
        backend.launch = launch


def forget(lm: Any) -> None:
    """Nothing is in the cache any more."""
    lm.engine.call(lm.engine.tree.index.clear)


def held_pages(lm: Any) -> int:
    """Pages that are neither free nor evictable."""
    tree = lm.engine.tree
    return lm.engine.call(lambda: tree.pool.count - tree.available)
