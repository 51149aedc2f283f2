"""The pool of pages: which are free.

A page has room for the keys and values of a few tokens. It belongs to one place at a time: to a
node of the prefix index, where any number of texts may read it, or to the end of one branch, which
alone writes into it. What the pages contain is the backend's business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from unspool.errors import UnspoolError


class OutOfPagesError(Exception):
    """No page is free and none can be evicted; the scheduler must preempt somebody."""


class PagePool:
    """A fixed number of pages."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UnspoolError(f"{count} pages are too few to hold anything; allow more memory")
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
