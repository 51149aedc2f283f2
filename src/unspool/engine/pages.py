"""Pages: who holds which, how many are left, and which are forgotten first.

A page has room for the keys and values of a few tokens. Texts that begin alike share pages: each
holder counts. A page that nobody holds is free. What the pages contain is the backend's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unspool.errors import UnspoolError


class OutOfPagesError(Exception):
    """No page is free; the scheduler must forget or put aside something."""


class PagePool:
    """A fixed number of pages, each with a count of its holders."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UnspoolError(f"{count} pages are too few to hold anything; allow more memory")
        self.count = count
        self._holders = np.zeros(count, np.int64)
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    @property
    def shared(self) -> int:
        """How many pages have several holders."""
        return int((self._holders > 1).sum())

    def take(self) -> int:
        """A free page, held once."""
        if not self._free:
            raise OutOfPagesError
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder of pages that are held already."""
        chosen = np.array(pages, np.int64)
        held = self._holders[chosen]
        assert held.all(), "only a held page can be shared"
        self._holders[chosen] = held + 1

    def let_go(self, pages: Sequence[int]) -> None:
        """One holder fewer; the last one frees a page. No page may be named twice."""
        chosen = np.array(pages, np.int64)
        left = self._holders[chosen] - 1
        assert (left >= 0).all(), "a page can only be let go by a holder"
        self._holders[chosen] = left
        self._free += chosen[left == 0].tolist()

    def holders(self, page: int) -> int:
        return int(self._holders[page])
