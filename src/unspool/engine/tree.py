"""The tree of tokens: branches that share their computed past.

A `Branch` is one way through the tree, from the first token of a prompt to its last. It can be
appended to, forked (both sides share all pages until one writes) and rewound (the pages behind are
given back). Computing what was appended is the engine's work; `computed` says how far it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from unspool.engine.pages import OutOfPagesError, PagePool
from unspool.engine.prefixes import Node, PrefixIndex


class Verbs(Protocol):
    """Who computes branches: the engine."""

    def extend(self, branch: Branch, tokens: Sequence[int] = ()) -> Any: ...

    def fork(self, branch: Branch) -> Branch: ...

    def rewind(self, branch: Branch, length: int) -> None: ...

    def release(self, branch: Branch) -> None: ...


class Branch:
    """A text: its tokens, and the pages that hold what is computed of them."""

    __slots__ = (
        "closed", "computed", "engine", "known", "logprobs", "node", "pages", "reused", "tokens"
    )  # fmt: skip

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = list(tokens)
        self.logprobs: list[float | None] = [None] * len(self.tokens)
        self.pages: list[int] = []
        self.computed = 0  # tokens whose keys and values are in the pages
        self.reused = 0  # tokens that were found computed when the branch was opened
        self.closed = False
        self.known = 0  # whole pages that the index has, the last of them at
        self.node: Node | None = None
        self.engine: Verbs | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, tokens: Sequence[int] = ()) -> Any:
        """Put tokens at the end and compute them: the logits of what comes next, [1, V]."""
        return self._verbs().extend(self, tokens)

    def fork(self) -> Branch:
        """Another branch with the same past; nothing is copied."""
        return self._verbs().fork(self)

    def rewind(self, length: int) -> None:
        """Forget every token from `length` on."""
        self._verbs().rewind(self, length)

    def release(self) -> None:
        """Not needed any more."""
        self._verbs().release(self)

    def _verbs(self) -> Verbs:
        assert self.engine is not None, "a branch that no engine opened"
        return self.engine

    @property
    def missed_from(self) -> int | None:
        """From which token on nothing could be reused; None if all but the last one could."""
        return self.reused if self.reused < len(self.tokens) - 1 else None


class Tree:
    """All branches of one engine, and the pages below them."""

    def __init__(
        self, page_count: int, page_size: int, copy_page: Callable[[int, int], None]
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(page_count)
        self.index = PrefixIndex(self.pool, page_size)
        self._copy_page = copy_page

    def open(self, tokens: Sequence[int]) -> Branch:
        """A branch with these tokens; what was computed of them before is taken over."""
        branch = Branch(tokens)
        self.adopt(branch)
        branch.reused = branch.computed
        return branch

    def adopt(self, branch: Branch) -> None:
        """Take over stored pages for a branch that has none."""
        assert not branch.pages
        # The last token is always computed: somebody wants to know what follows it.
        match = self.index.match(branch.tokens[:-1])
        branch.pages = list(match.pages)
        self.pool.hold(branch.pages)
        branch.computed = len(match.pages) * self.page_size
        branch.node, branch.known = match.node, len(match.pages)
        if match.partial is not None:
            self.pool.hold([match.partial])
            try:
                copied = self._take()
            except OutOfPagesError:
                self.pool.let_go([match.partial])
                return
            self._copy_page(match.partial, copied)
            self.pool.let_go([match.partial])
            branch.pages.append(copied)
            branch.computed = match.tokens

    def append(
        self, branch: Branch, tokens: Sequence[int], logprobs: Sequence[float | None] = ()
    ) -> None:
        """Put tokens behind the branch; they are computed when the engine runs next."""
        branch.tokens.extend(tokens)
        branch.logprobs.extend(logprobs or [None] * len(tokens))

    def fork(self, branch: Branch) -> Branch:
        """Another branch with the same past. Nothing is copied."""
        other = Branch(())
        other.tokens, other.logprobs = branch.tokens.copy(), branch.logprobs.copy()
        other.pages = branch.pages.copy()
        other.computed, other.reused = branch.computed, branch.computed
        other.node, other.known, other.engine = branch.node, branch.known, branch.engine
        self.pool.hold(other.pages)
        return other

    def rewind(self, branch: Branch, length: int) -> None:
        """Forget every token from `length` on; their pages stay findable in the index."""
        if not 0 <= length <= len(branch.tokens):
            raise ValueError(f"cannot rewind {len(branch.tokens)} tokens to {length}")
        self.unwind(branch, length)
        del branch.tokens[length:], branch.logprobs[length:]

    def unwind(self, branch: Branch, length: int) -> None:
        """Keep the tokens, but have those from `length` on computed again."""
        if branch.computed > length:
            self._store(branch, branch.computed)
            branch.computed = length
        needed = -(-branch.computed // self.page_size)
        self.pool.let_go(branch.pages[needed:])
        del branch.pages[needed:]
        while branch.known > branch.computed // self.page_size:
            assert branch.node is not None
            branch.node, branch.known = branch.node.parent, branch.known - 1
        if not branch.known:
            branch.node = None

    def close(self, branch: Branch) -> None:
        """The branch is not needed any more; what it computed stays in the index for others."""
        if branch.closed:
            return
        branch.closed = True
        if branch.computed:
            self._store(branch, branch.computed)
        self.put_aside(branch)

    def put_aside(self, branch: Branch) -> None:
        """Take all pages from a branch; it keeps its tokens and can be computed again."""
        self.pool.let_go(branch.pages)
        branch.pages = []
        branch.computed = branch.known = 0
        branch.node = None

    def reserve(self, branch: Branch, length: int) -> None:
        """Make sure that the branch has pages of its own to write up to `length` tokens.

        A partly filled page that others hold too is copied; where there is no room for a copy, it
        is left to them, and its few tokens are computed again.
        """
        last, filled = divmod(branch.computed, self.page_size)
        if branch.computed < length and filled and self.pool.holders(branch.pages[last]) > 1:
            given_up = [branch.pages[last]]
            try:
                own = self._take()
                self._copy_page(branch.pages[last], own)
                branch.pages[last] = own
            except OutOfPagesError:
                given_up = branch.pages[last:]
                del branch.pages[last:]
                branch.computed = last * self.page_size
            self.pool.let_go(given_up)
        while len(branch.pages) * self.page_size < length:
            branch.pages.append(self._take())

    def computed(self, branch: Branch, length: int) -> None:
        """The engine has computed the branch up to `length`; whole pages can be shared now."""
        whole = length // self.page_size
        if whole > branch.computed // self.page_size:
            self._store(branch, whole * self.page_size)
        branch.computed = length

    def _store(self, branch: Branch, length: int) -> None:
        """Put the branch's pages up to `length` into the index, from where it knows them on."""
        branch.node = self.index.add(branch.tokens, branch.pages, length, branch.node, branch.known)
        branch.known = length // self.page_size

    def _take(self) -> int:
        if not self.pool.free:
            self.index.forget(max(1, self.pool.count // 64))
        return self.pool.take()
