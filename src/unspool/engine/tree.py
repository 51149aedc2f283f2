"""The tree of tokens: branches that share their computed past.

A `Branch` is one way through the tree, from the first token of a prompt to its last. Its whole
pages are nodes of the prefix index, which all branches with the same beginning share; what follows
the last whole page is its own. So appending, forking and rewinding cost the same however long the
text is. Computing what was appended is the engine's work; `computed` says how far it is.

Tokens may be provisional: they can be computed and replaced as often as one likes, and become part
of what others can find only when they are committed. The tokens of a branch may also see to the end
of their block: then what is computed of a token holds only as long as its block stays as it is.

Of a model with recurrent layers a branch stands where a state of it is kept (`states.py`): whatever
takes it back takes it to the last state before that place, and the rest is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from unspool.engine.branch import Branch
from unspool.engine.pages import OutOfPagesError, PagePool
from unspool.engine.prefixes import Node, PrefixIndex
from unspool.engine.state_policy import PAGE
from unspool.engine.states import StatePool


class Tree:
    """All branches of one engine, and the pages below them."""

    def __init__(self, page_count: int, page_size: int, states: StatePool | None = None) -> None:
        self.page_size = page_size
        self.pool, self.states = PagePool(page_count), states
        self.index = PrefixIndex(self.pool, page_size, states)
        if states is not None:
            states.lost = self._fall_back
        # Pages to copy before the next step is run, source by target. A source holds its content
        # before the step: no source is a target, so the copies may be made in any order.
        self.copies: dict[int, int] = {}
        # Whether hooks change what the model computes, so that it is of use only to them.
        self.is_hooked: Callable[[], bool] = lambda: False
        self._owners = count(1)
        # Called with an adapter's number when the last branch with it is closed.
        self.adapter_unused: Callable[[int], None] = lambda adapter: None
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
        branch = self._new(self.index.root(adapter, block), adapter, block)
        self.index.attach(branch.node)
        branch.tail, branch.length = list(tokens), len(tokens)
        if self.is_hooked():
            self.make_private(branch)
        if cached:
            self.adopt(branch)
        branch.reused = branch.computed
        return branch

    def make_private(self, branch: Branch) -> None:
        """Let what is computed of the branch from now on be found by nobody, and let it use nothing
        that others compute. It stays so: its past may be changed. What it shares is unchanged."""
        branch.private = branch.private or next(self._owners)

    def adopt(self, branch: Branch) -> None:
        """Take over stored pages for a branch of which nothing is computed."""
        assert branch.computed == 0 and not branch.pages
        if branch.private or self.is_hooked():
            return
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
        self._fall_back(branch)

    def append(self, branch: Branch, tokens: Sequence[int], *, provisional: bool = False) -> None:
        """Put tokens behind the branch; they are computed when the engine runs next."""
        if provisional and branch.provisional is None:
            branch.provisional = branch.length
        if branch.block:
            branch.computed = min(branch.computed, branch.whole_blocks(branch.length))
        if branch.provisional is not None:  # what is provisional sees what comes behind it
            branch.computed = min(branch.computed, branch.provisional)
            self._fall_back(branch, store=False)
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
        self._fall_back(branch, store=False)

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
        if self.states is not None:
            self._fall_back(branch)
            self.states.hold(branch)
        other = self._new(branch.node, branch.adapter, branch.block)
        self.index.attach(other.node)
        other.start, other.length = branch.start, branch.length
        other.tail = branch.tail.copy()
        other.provisional, other.twin = branch.provisional, branch.twin
        if branch.private:
            self.make_private(other)
        known = branch.start if branch.borrowed is None else branch.computed
        other.computed = other.reused = min(branch.computed, known)
        other.owner = branch.owner
        if branch.borrowed is not None:
            self._borrow(other, branch.borrowed)
        self._fall_back(other)
        return other

    def twin(self, branch: Branch, tokens: Sequence[int], guessed: int) -> Branch | None:
        """A branch with what is computed of another, then these tokens, the last of them guesses,
        and pages of its own for them; found by nobody. None if there is no room. The other one must
        have its own pages already, and a slot that it writes its state into."""
        other = self._new(branch.node, branch.adapter)
        self.index.attach(other.node)
        other.start, other.computed = branch.start, branch.computed
        if branch.private:
            self.make_private(other)
        other.tail = [*branch.tail[: branch.computed - branch.start], *tokens]
        other.length = branch.computed + len(tokens)
        try:
            if branch.computed > branch.start:
                other.pages.append(self._copy_page(branch.pages[0]))
            self.reserve(other, other.length)
            if self.states is not None:
                self.states.stand_beside(other, branch)
                self.states.plan(other, other.length, guessed=guessed)
        except OutOfPagesError:
            self.close(other, store=False)
            return None
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
        self._fall_back(branch, length, store=store)
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
        if self.states is not None:
            self._fall_back(branch, first)
        else:
            self._go_back(branch, first, True)

    def close(self, branch: Branch, *, store: bool = True) -> None:
        """The branch is not needed any more; what it computed stays in the index for others."""
        if branch.closed:
            return
        branch.closed = True
        if store:
            self._store_tail(branch)
        if self.states is not None:
            if store:
                self.states.hold(branch)
            self.states.stand(branch, None)
            self.states.run(branch, False)
        self._drop_own(branch)
        self.index.detach(branch.node)
        if branch.slot >= 0:
            self._slots.append(branch.slot)
            branch.slot = -1
        if branch.adapter and not self.index.needs(branch.adapter):
            self.adapter_unused(branch.adapter)

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
        if self.states is not None:
            self.states.stand(branch, None)
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
        try:
            if missing > 0 and self.index.evict(max(missing, self.pool.count // 64)) < missing:
                raise OutOfPagesError
            if lender is not None and not takes_over:
                branch.pages.append(self._copy_page(lender.page))
        except OutOfPagesError:
            if lender is None:
                raise
            self._drop_own(branch)  # the few tokens of the borrowed page are computed again
            self._fall_back(branch, store=False)
            self.reserve(branch, length)
            return
        if lender is not None:
            branch.borrowed = None
            self.index.detach(lender)
            if takes_over:
                if self.states is not None:
                    self.states.take_over(branch, lender)
                branch.pages.append(self.index.take_out(lender))
            needed -= 1
        branch.pages += [self.pool.allocate() for _ in range(needed)]

    def advance(self, branch: Branch, computed: int) -> None:
        """The branch is computed so far; whole pages are shared from now on."""
        branch.computed = computed
        size, final = self.page_size, computed
        if branch.provisional is not None and branch.provisional < final:
            final = branch.provisional
        whole, block = (final - branch.start) // size, branch.block
        while (
            block and whole and self.index.reach(branch.start + (whole - 1) * size, block) > final
        ):
            whole -= 1  # its last block is not whole
        if whole <= 0:
            return
        first = branch.start
        for number in range(whole):
            page = branch.pages[number]
            chunk = tuple(branch.tail[number * size : (number + 1) * size])
            seen = self.index.reach(first + number * size, block) - first
            ahead = tuple(branch.tail[(number + 1) * size : seen])
            node = self.index.insert(branch.node, chunk, page, ahead, branch.private)
            if node.page != page:  # somebody else had computed the same
                branch.tabled = min(branch.tabled, branch.node.depth)
            self._move(branch, node)
            if self.states is not None:
                self.states.hand_over(branch, node, branch.start)
        if self.states is not None:
            self.states.thin(branch, whole)
        del branch.pages[:whole], branch.tail[: whole * size]

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the pending page copies as (source, target) and clear them."""
        copies = [(source, target) for target, source in self.copies.items()]
        self.copies.clear()
        return copies

    # -- below -------------------------------------------------------------------------------

    def _copy_page(self, source: int) -> int:
        """Allocate a page that the next step fills with a copy of `source`.

        The source of a chain of copies is its first page. The target is no page that another
        pending copy reads, though that one may be free already.

        Raises:
            OutOfPagesError: No such page is free, and none can be evicted.
        """
        while True:
            try:
                target = self.pool.allocate(excluded=self.copies.values())
            except OutOfPagesError:
                if not self.index.evict(1):
                    raise
            else:
                self.copies[target] = self.copies.get(source, source)
                return target

    def _new(self, node: Node, adapter: int, block: int = 0) -> Branch:
        return Branch(node, adapter, block, stateful=self.states is not None)

    def _fall_back(self, branch: Branch, first: int | None = None, *, store: bool = True) -> None:
        """Let a branch be computed as far as the last state that is kept of it, and not beyond
        `first`. If it is worth storing, so is where it stood, and where it was to go."""
        if self.states is None or branch.state is None:
            return
        limit = branch.computed if first is None else min(first, branch.computed)
        tip = branch.state.tip
        if limit == branch.computed == (0 if tip is None else tip.length):
            return
        if store:
            self._store_tail(branch)
            self.states.hold(branch, PAGE)
        state = self.states.nearest(branch, limit)
        known = 0 if state is None else state.length
        if store and limit - known >= self.page_size:
            branch.state.junction = limit
        self._go_back(branch, known, False)
        self.states.stand(branch, state)

    def _go_back(self, branch: Branch, first: int, store: bool) -> None:
        """Keep the tokens, but nothing of what is computed from `first` on."""
        if first < branch.start:
            dropped, length = branch.tokens[first:], branch.length
            self._step_back(branch, first, store)
            branch.tail[first - branch.start :] = dropped
            branch.length = length
        else:
            if store:
                self._store_tail(branch)
            branch.computed = min(branch.computed, first)
            self._trim(branch)

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
        node = self.index.insert(branch.node, chunk, branch.pages[0], owner=branch.private)
        self._borrow(branch, node)
        if self.states is not None:
            self.states.hand_over(branch, node, branch.start + len(chunk))
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
