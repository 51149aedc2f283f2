"""A branch: one way through the tree of tokens, and what is computed of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unspool.backends.step import Logits
from unspool.engine.prefixes import Node
from unspool.engine.standing import Standing


class Owner(Protocol):
    """Who computes branches: the engine."""

    def extend(self, branch: Branch, tokens: Sequence[int] = ()) -> Logits: ...

    def fork(self, branch: Branch) -> Branch: ...

    def rewind(self, branch: Branch, length: int) -> None: ...

    def release(self, branch: Branch) -> None: ...


class Branch:
    """A text: its tokens, and the pages that hold what is computed of them."""

    __slots__ = (
        "adapter", "block", "borrowed", "closed", "computed", "length", "node", "owner", "pages",
        "private", "provisional", "reused", "slot", "start", "state", "tabled", "tail", "twin",
    )  # fmt: skip

    def __init__(
        self, root: Node, adapter: int = 0, block: int = 0, *, stateful: bool = False
    ) -> None:
        self.node = root  # the last whole page
        self.adapter = adapter  # the number of the one it is computed with; 0: none
        self.twin: int | None = None  # ... and of that of its provisional end, if it is another
        self.block = block  # each token sees to the end of its block of so many; 0: only back
        self.start = 0  # how many tokens the whole pages hold
        self.tail: list[int] = []  # the tokens behind them
        self.length = 0  # tokens in all
        self.computed = 0  # tokens whose keys and values are in the pages
        self.pages: list[int] = []  # the branch's own, from position `start` on
        self.borrowed: Node | None = None  # whose page holds tail[:computed - start] instead
        self.provisional: int | None = None  # from which position on tokens may still change
        self.reused = 0  # tokens that were found computed when the branch was opened
        self.closed = False
        # A number of its own if hooks changed what it computed, so that nobody finds it; else 0.
        self.private = 0
        self.slot = -1  # its line of the block table
        self.tabled = 0  # how many pages that line has right
        self.state = Standing(self) if stateful else None  # where its recurrent state is
        self.owner: Owner | None = None

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
        """Of so many tokens, those whose keys and values do not change with what follows."""
        return length // self.block * self.block if self.block else length

    def step_end(self, first: int, until: int) -> int:
        """Up to where one step can compute from `first` on, about to `until`: tokens that see each
        other are computed together."""
        begin = self.length if self.provisional is None else self.provisional
        if self.twin is not None and first < begin:
            until = min(until, begin)
        if until >= self.length or (first < until <= begin and not self.block):
            return until
        if self.block:
            end = max(self.whole_blocks(until), self.whole_blocks(first) + self.block)
            return min(end, self.length)
        return begin if first < begin else self.length

    def pages_from(self, column: int) -> list[int]:
        """The pages of the block table from a column on."""
        if column >= self.node.depth:
            return self.pages[column - self.node.depth :]
        found, node = [], self.node
        while node.parent is not None and node.depth > column:
            found.append(node.page)
            node = node.parent
        return found[::-1] + self.pages

    # -- the verbs, for whoever holds a branch ------------------------------------------------

    def append(self, tokens: Sequence[int] = ()) -> Logits:
        """Put tokens at the end and compute them: the logits of what comes next, [1, V]."""
        return self._owner().extend(self, tokens)

    def fork(self) -> Branch:
        """Another branch with the same past; nothing is copied."""
        return self._owner().fork(self)

    def rewind(self, length: int) -> None:
        """Drop every token from `length` on."""
        self._owner().rewind(self, length)

    def release(self) -> None:
        """Not needed any more."""
        self._owner().release(self)

    def _owner(self) -> Owner:
        assert self.owner is not None, "a branch that no engine opened"
        return self.owner
