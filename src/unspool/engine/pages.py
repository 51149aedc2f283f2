"""Pages: who holds which, how many are left, and which are forgotten first.

A page has room for the keys and values of a few tokens. Texts that begin alike share pages: each
holder counts. A page that nobody holds is free. What the pages contain is the backend's business.
"""

from __future__ import annotations

from unspool.errors import UnspoolError


class OutOfPagesError(Exception):
    """No page is free; the scheduler must forget or put aside something."""


class PagePool:
    """A fixed number of pages, each with a count of its holders."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UnspoolError(f"{count} pages are too few to hold anything; allow more memory")
        self.count = count
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def take(self) -> int:
        """A free page, held once."""
        if not self._free:
            raise OutOfPagesError
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a page that is held already."""
        assert self._holders[page] > 0, "only a held page can be shared"
        self._holders[page] += 1

    def let_go(self, page: int) -> None:
        """One holder fewer; the last one frees the page."""
        assert self._holders[page] > 0, "a page can only be let go by a holder"
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)

    def holders(self, page: int) -> int:
        return self._holders[page]
