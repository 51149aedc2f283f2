"""A branch: one path through the tree of tokens, and its pages in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unspool.backends.step import Logits
from unspool.engine.prefixes import PageNode
from unspool.engine.standing import StateCursor


class BranchOwner(Protocol):
    """What computes branches: the engine."""

    def extend(self, branch: Branch, tokens: Sequence[int] = ()) -> Logits: ...

    def fork(self, branch: Branch) -> Branch: ...

    def rewind(self, branch: Branch, length: int) -> None: ...

    def release(self, branch: Branch) -> None: ...


class Branch:
    """A text: its tokens, and the pages with their keys and values."""

    __slots__ = (
        "adapter",
        "block",
        "canvas_adapter",
        "closed",
        "length",
        "node",
        "num_computed",
        "num_reused",
        "num_table_pages",
        "owner",
        "pages",
        "private_id",
        "provisional",
        "shared_tail",
        "slot",
        "start",
        "state",
        "tail",
    )  # fmt: skip

    def __init__(
        self, root: PageNode, adapter: int = 0, block: int = 0, *, stateful: bool = False
    ) -> None:
        self.node = root  # the last full page, in the prefix cache
        self.adapter = adapter  # number of its LoRA adapter; 0: none
        self.canvas_adapter: int | None = None  # ... of its provisional end, if that has another
        self.block = block  # tokens attend to the end of their block of this size; 0: causal
        self.start = 0  # tokens in full pages
        self.tail: list[int] = []  # the tokens after them
        self.length = 0  # tokens in all
        self.num_computed = 0  # tokens whose keys and values are in pages
        self.pages: list[int] = []  # the branch's own, from position `start` on
        # The cache node whose page holds tail[:computed - start], while the branch has no own page.
        self.shared_tail: PageNode | None = None
        self.provisional: int | None = None  # position from which on tokens may still change
        self.num_reused = 0  # cached tokens when the branch was opened
        self.closed = False
        # Not 0 if hooks changed its activations: then its pages are not shared.
        self.private_id = 0
        self.slot = -1  # its row of the block table
        self.num_table_pages = 0  # pages that are up to date in that row
        self.state = StateCursor(self) if stateful else None  # its recurrent state
        self.owner: BranchOwner | None = None

    def __len__(self) -> int:
        return self.length

    @property
    def tokens(self) -> list[int]:
        parts, node = [self.tail], self.node
        while node.parent is not None:
            parts.append(list(node.tokens))
            node = node.parent
        return [token for part in reversed(parts) for token in part]

    def whole_blocks(self, length: int) -> int:
        """Return how many of the first `length` tokens are in complete blocks: what follows does
        not change their keys and values."""
        return length // self.block * self.block if self.block else length

    def step_end(self, first: int, until: int) -> int:
        """Return where a step from `first` to about `until` must end: tokens that attend to each
        other are computed together."""
        begin = self.length if self.provisional is None else self.provisional
        if self.canvas_adapter is not None and first < begin:
            until = min(until, begin)
        if until >= self.length or (first < until <= begin and not self.block):
            return until
        if self.block:
            end = max(self.whole_blocks(until), self.whole_blocks(first) + self.block)
            return min(end, self.length)
        return begin if first < begin else self.length

    def pages_from(self, column: int) -> list[int]:
        """Return the branch's pages from a column of the block table on."""
        if column >= self.node.depth:
            return self.pages[column - self.node.depth :]
        pages, node = [], self.node
        while node.parent is not None and node.depth > column:
            pages.append(node.page)
            node = node.parent
        return pages[::-1] + self.pages

    # -- for callers outside the engine -------------------------------------------------------

    def append(self, tokens: Sequence[int] = ()) -> Logits:
        """Append tokens and compute them; return the logits of the next token, [1, V]."""
        return self._owner().extend(self, tokens)

    def fork(self) -> Branch:
        """Return another branch with the same past; nothing is copied."""
        return self._owner().fork(self)

    def rewind(self, length: int) -> None:
        """Drop every token from `length` on."""
        self._owner().rewind(self, length)

    def release(self) -> None:
        """Close the branch; its pages may serve others."""
        self._owner().release(self)

    def _owner(self) -> BranchOwner:
        assert self.owner is not None, "the branch was not opened by an engine"
        return self.owner
