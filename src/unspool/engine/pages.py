"""The pool of KV-cache pages.

A page holds the keys and values of `page_size` tokens. It belongs to one owner at a time: a node of
the prefix cache, where any number of branches may read it, or the end of one branch, which alone
writes to it. The backend knows the contents; the pool only knows which pages are free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from unspool.errors import UnspoolError


class OutOfPagesError(Exception):
    """No page is free and none can be evicted; the scheduler must preempt a task."""


class PagePool:
    """A fixed number of pages."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UnspoolError(
                f"the KV cache needs at least 1 page, got {count}; allow more memory"
            )
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def allocate(self, excluded: Collection[int] = ()) -> int:
        """Take a free page that is not among the `excluded` ones."""
        for index in range(len(self._free) - 1, -1, -1):
            if not excluded or self._free[index] not in excluded:
                return self._free.pop(index)
        raise OutOfPagesError

    def release(self, pages: Iterable[int]) -> None:
        self._free += pages
