"""The tree of tokens: branches that share their computed past.

A `Branch` is one way through the tree, from the first token of a prompt to its last. Its whole
pages are nodes of the prefix index, which all branches with the same beginning share; what follows
the last whole page is its own. So appending, forking and rewinding cost the same however long the
text is. Computing what was appended is the engine's work; `computed` says how far it is.

Tokens may be provisional: they can be computed and replaced as often as one likes, and become part
of what others can find only when they are committed. The tokens of a branch may also see to the end
of their block: then what is computed of a token holds only as long as its block stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unspool.backends.step import Logits
from unspool.engine.pages import OutOfPagesError, PagePool
from unspool.engine.prefixes import Node, PrefixIndex


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
        "provisional", "reused", "slot", "start", "tabled", "tail", "twin",
    )  # fmt: skip

    def __init__(self, root: Node, adapter: int = 0, block: int = 0) -> None:
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
        self.slot = -1  # its line of the block table
        self.tabled = 0  # how many pages that line has right
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


class Tree:
    """All branches of one engine, and the pages below them."""

    def __init__(self, page_count: int, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(page_count)
        self.index = PrefixIndex(self.pool, page_size)
        self.copies: list[tuple[int, int]] = []  # pages to copy before the next step is run
        self._slots: list[int] = []  # lines of the block table that were given back
        self._slot_count = 0

    @property
    def available(self) -> int:
        """Pages that are free or can be made free."""
        return self.pool.free + self.index.evictable

    def open(
        self, tokens: Sequence[int], cached: bool = True, adapter: int = 0, block: int = 0
    ) -> Branch:
        """A branch with these tokens; what was computed of them before is taken over."""
        branch = Branch(self.index.root(adapter, block), adapter, block)
        self.index.attach(branch.node)
        branch.tail, branch.length = list(tokens), len(tokens)
        if cached:
            self.adopt(branch)
        branch.reused = branch.computed
        return branch

    def adopt(self, branch: Branch) -> None:
        """Take over stored pages for a branch of which nothing is computed."""
        assert branch.computed == 0 and not branch.pages
        # The last token is always computed: somebody wants to know what follows it. So are those
        # that may still change, as they see each other.
        known = branch.length - 1
        if branch.provisional is not None:
            known = min(known, branch.provisional)
        root, block = self.index.root(branch.adapter, branch.block), branch.block
        node, partial, length = self.index.match(
            branch.tail[: max(0, branch.whole_blocks(known))], root, block
        )
        self._move(branch, node)
        del branch.tail[: branch.start]
        length = max(branch.start, branch.whole_blocks(length))
        if partial is not None and length > branch.start:
            self._borrow(branch, partial)
        branch.computed = length

    def append(self, branch: Branch, tokens: Sequence[int], *, provisional: bool = False) -> None:
        """Put tokens behind the branch; they are computed when the engine runs next."""
        if provisional and branch.provisional is None:
            branch.provisional = branch.length
        if branch.block:
            branch.computed = min(branch.computed, branch.whole_blocks(branch.length))
        if branch.provisional is not None:  # what is provisional sees what comes behind it
            branch.computed = min(branch.computed, branch.provisional)
        branch.tail.extend(tokens)
        branch.length += len(tokens)

    def replace(self, branch: Branch, position: int, tokens: Sequence[int]) -> None:
        """Other tokens in the place of provisional ones, which are computed again from the first
        provisional position on (all of them may see each other)."""
        first = branch.provisional
        if first is None or position < first or position + len(tokens) > branch.length:
            raise ValueError("only provisional tokens can be replaced")
        at = position - branch.start
        branch.tail[at : at + len(tokens)] = tokens
        branch.computed = min(branch.computed, first)

    def commit(self, branch: Branch, length: int | None = None) -> None:
        """What is provisional, or what of it lies before `length`, stays as it is, and can be found
        by others."""
        branch.provisional = None if length is None or length >= branch.length else length
        self.advance(branch, branch.computed)

    def fork(self, branch: Branch) -> Branch:
        """Another branch with the same past. Nothing is copied but the unfinished page's tokens;
        what is computed of provisional tokens is lost to both."""
        self._store_tail(branch)
        if branch.provisional is not None:
            branch.computed = min(branch.computed, branch.provisional)
        other = Branch(branch.node, branch.adapter, branch.block)
        self.index.attach(other.node)
        other.start, other.length = branch.start, branch.length
        other.tail = branch.tail.copy()
        other.provisional, other.twin = branch.provisional, branch.twin
        known = branch.start if branch.borrowed is None else branch.computed
        other.computed = other.reused = min(branch.computed, known)
        other.owner = branch.owner
        if branch.borrowed is not None:
            self._borrow(other, branch.borrowed)
        return other

    def rewind(self, branch: Branch, length: int, *, store: bool = True) -> None:
        """Drop every token from `length` on; what is computed of them stays findable, if it is
        worth storing."""
        if not 0 <= length <= branch.length:
            raise ValueError(f"cannot rewind {branch.length} tokens to {length}")
        if branch.provisional is not None:  # what is left of these saw what is dropped
            branch.computed = min(branch.computed, branch.provisional)
            if branch.provisional >= length:
                branch.provisional = None
        if branch.block:
            self.recompute(branch, branch.whole_blocks(length))
        if length < branch.start:
            self._step_back(branch, length, store)
            del branch.tail[length - branch.start :]
        else:
            kept = length - branch.start
            if branch.computed > length:
                if store:
                    self._store_tail(branch)
                branch.computed = min(branch.computed, length)
            del branch.tail[kept:]
            self._trim(branch)
        branch.length = length

    def recompute(self, branch: Branch, first: int) -> None:
        """Keep the tokens, but have those from `first` on computed again."""
        if branch.computed <= first:
            return
        if first < branch.start:
            dropped, length = branch.tokens[first:], branch.length
            self._step_back(branch, first, True)
            branch.tail[first - branch.start :] = dropped
            branch.length = length
        else:
            self._store_tail(branch)
            branch.computed = min(branch.computed, first)
            self._trim(branch)

    def close(self, branch: Branch, *, store: bool = True) -> None:
        """The branch is not needed any more; what it computed stays in the index for others."""
        if branch.closed:
            return
        branch.closed = True
        if store:
            self._store_tail(branch)
        self._drop_own(branch)
        self.index.detach(branch.node)
        if branch.slot >= 0:
            self._slots.append(branch.slot)
            branch.slot = -1

    def slot_of(self, branch: Branch) -> int:
        """The branch's line of the block table; it gets one when it first runs."""
        if branch.slot < 0:
            if self._slots:
                branch.slot = self._slots.pop()
            else:
                branch.slot, self._slot_count = self._slot_count, self._slot_count + 1
            branch.tabled = 0
        return branch.slot

    def preempt(self, branch: Branch) -> None:
        """Take all pages from a branch; it keeps its tokens, and is computed again later. Its
        whole pages stay in the index as long as nobody needs their room."""
        tokens = branch.tokens
        self._drop_own(branch)
        self._move(branch, self.index.root(branch.adapter, branch.block))
        branch.tail, branch.computed = tokens, 0

    def reserve(self, branch: Branch, length: int) -> None:
        """Make sure that the branch has pages of its own to write up to `length` tokens.

        Where pages are lacking, none is taken. A page that is borrowed is copied by the next step,
        unless nobody else needs it; without room for a copy its tokens are computed again, so look
        at `computed` afterwards.
        """
        needed = -(-(length - branch.start) // self.page_size) - len(branch.pages)
        if needed <= 0:
            return
        lender, takes_over = branch.borrowed, False
        if lender is not None:
            filled = branch.computed - branch.start
            takes_over = lender.live == 1 and not lender.children and len(lender.tokens) <= filled
        missing = needed - takes_over - self.pool.free
        if missing > 0 and self.index.evict(max(missing, self.pool.count // 64)) < missing:
            if lender is None:
                raise OutOfPagesError
            self._drop_own(branch)  # the few tokens of the borrowed page are computed again
            self.reserve(branch, length)
            return
        if lender is not None:
            branch.borrowed = None
            self.index.detach(lender)
            if takes_over:
                branch.pages.append(self.index.take_out(lender))
            else:
                branch.pages.append(self.pool.allocate())
                self.copies.append((lender.page, branch.pages[-1]))
            needed -= 1
        branch.pages += [self.pool.allocate() for _ in range(needed)]

    def advance(self, branch: Branch, computed: int) -> None:
        """The branch is computed so far; whole pages are shared from now on."""
        branch.computed = computed
        size, final = self.page_size, computed
        if branch.provisional is not None and branch.provisional < final:
            final = branch.provisional
        whole, block = (final - branch.start) // size, branch.block
        while block and whole and self.index.reach(branch.start + (whole - 1) * size, block) > final:
            whole -= 1  # its last block is not whole
        if whole <= 0:
            return
        first = branch.start
        for number in range(whole):
            page = branch.pages[number]
            chunk = tuple(branch.tail[number * size : (number + 1) * size])
            seen = self.index.reach(first + number * size, block) - first
            ahead = tuple(branch.tail[(number + 1) * size : seen])
            node = self.index.insert(branch.node, chunk, page, ahead)
            if node.page != page:  # somebody else had computed the same
                branch.tabled = min(branch.tabled, branch.node.depth)
            self._move(branch, node)
        del branch.pages[:whole], branch.tail[: whole * size]

    # -- below -------------------------------------------------------------------------------

    def _move(self, branch: Branch, node: Node) -> None:
        """Let the branch stand at another node."""
        self.index.attach(node)
        self.index.detach(branch.node)
        branch.node, branch.start = node, node.depth * self.page_size
        branch.tabled = min(branch.tabled, node.depth)

    def _borrow(self, branch: Branch, node: Node) -> None:
        self.index.attach(node)
        branch.borrowed = node

    def _step_back(self, branch: Branch, length: int, store: bool) -> None:
        """Stand before position `length`, which lies in one of the whole pages."""
        if store:
            self._store_tail(branch)
        self._drop_own(branch)
        node, behind = branch.node, branch.node
        while node.depth * self.page_size > length:
            assert node.parent is not None
            node, behind = node.parent, node
        if length > node.depth * self.page_size:
            self._borrow(branch, behind)  # first: it keeps the page from being evicted
        self._move(branch, node)
        branch.tail = list(behind.tokens) if branch.borrowed is not None else []
        branch.computed = length

    def _trim(self, branch: Branch) -> None:
        """Give back the pages behind what is computed."""
        needed = -(-(branch.computed - branch.start) // self.page_size)
        if needed < len(branch.pages):
            self.pool.release(branch.pages[needed:])
            del branch.pages[needed:]
            branch.tabled = min(branch.tabled, branch.node.depth + needed)
        if needed == 0 and branch.borrowed is not None:
            self.index.detach(branch.borrowed)
            branch.borrowed = None

    def _store_tail(self, branch: Branch) -> None:
        """Put the computed part of the unfinished page into the index, and borrow it from there."""
        filled = branch.computed - branch.start
        if branch.provisional is not None:
            filled = min(filled, branch.provisional - branch.start)
        filled = branch.whole_blocks(branch.start + filled) - branch.start
        if filled <= 0 or not branch.pages or (branch.block and self.page_size % branch.block):
            return
        chunk = tuple(branch.tail[: min(filled, self.page_size)])
        self._borrow(branch, self.index.insert(branch.node, chunk, branch.pages[0]))
        self.pool.release(branch.pages[1:])
        branch.pages.clear()
        branch.tabled = min(branch.tabled, branch.node.depth)
        branch.computed = branch.start + len(chunk)

    def _drop_own(self, branch: Branch) -> None:
        """Give back what is not a whole page."""
        self.pool.release(branch.pages)
        branch.pages.clear()
        branch.tabled = min(branch.tabled, branch.node.depth)
        branch.computed = min(branch.computed, branch.start)
        if branch.borrowed is not None:
            self.index.detach(branch.borrowed)
            branch.borrowed = None
