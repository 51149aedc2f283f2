"""The tree of tokens: branches that share their computed past.

A `Branch` is one path through the tree, from the first token of a prompt to the last. Its full
pages are nodes of the prefix cache, which all branches with the same prefix share; the tokens after
the last full page are its own. So appending, forking and rewinding take constant time, however long
the text is. The engine computes what was appended; `Branch.computed` says how far it is.

Tokens may be provisional: they can be replaced and computed any number of times, and enter the
prefix cache only when they are committed. The tokens of a branch may also attend to the end of
their block: then the keys and values of a token are valid only until its block changes.

With recurrent layers, a branch can only be rewound to a position whose state is kept (`states.py`):
it falls back to the last such position, and the tokens after it are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from unspool.engine.branch import Branch
from unspool.engine.pages import OutOfPagesError, PagePool
from unspool.engine.prefixes import PageNode, PrefixIndex
from unspool.engine.state_policy import PAGE
from unspool.engine.states import OutOfStatesError, StatePool


class Tree:
    """All branches of one engine, and their pages. Used by the engine thread only."""

    def __init__(self, page_count: int, page_size: int, states: StatePool | None = None) -> None:
        self.page_size = page_size
        self.pool, self.states = PagePool(page_count), states
        self.index = PrefixIndex(self.pool, page_size, states)
        if states is not None:
            states.on_state_lost = self._fall_back
        # Page copies for the start of the next step, source by target. No source is a target, so
        # they may be made in any order.
        self.copies: dict[int, int] = {}
        # Whether hooks change the model's activations: then its pages must not be shared.
        self.is_hooked: Callable[[], bool] = lambda: False
        self._private_ids = count(1)
        # Called with an adapter's number when the last branch with it is closed.
        self.on_adapter_unused: Callable[[int], None] = lambda adapter: None
        self._free_slots: list[int] = []  # rows of the block table
        self._slot_count = 0

    @property
    def available(self) -> int:
        """Pages that are free or can be evicted."""
        return self.pool.free + self.index.evictable

    def open(
        self, tokens: Sequence[int], cached: bool = True, adapter: int = 0, block: int = 0
    ) -> Branch:
        """Open a branch with these tokens; cached pages are used unless `cached` is False."""
        branch = self._new(self.index.root(adapter, block), adapter, block)
        self.index.attach(branch.node)
        branch.tail, branch.length = list(tokens), len(tokens)
        if self.is_hooked():
            self.make_private(branch)
        if cached:
            self.adopt(branch)
        branch.num_reused = branch.num_computed
        return branch

    def make_private(self, branch: Branch) -> None:
        """Cut the branch off from the prefix cache: it neither shares new pages nor finds any.

        This is permanent, as its activations may have been changed by hooks. Pages that it shares
        already are unchanged.
        """
        branch.private_id = branch.private_id or next(self._private_ids)

    def adopt(self, branch: Branch) -> None:
        """Find cached pages for a branch of which nothing is computed."""
        assert branch.num_computed == 0 and not branch.pages
        if branch.private_id or self.is_hooked():
            return
        # The last token is always computed, for its logits; so are provisional tokens, which
        # attend to each other.
        max_reused = branch.length - 1
        if branch.provisional is not None:
            max_reused = min(max_reused, branch.provisional)
        root, block = self.index.root(branch.adapter, branch.block), branch.block
        node, partial, length = self.index.match(
            branch.tail[: max(0, branch.whole_blocks(max_reused))], root, block
        )
        self._move(branch, node)
        del branch.tail[: branch.start]
        length = max(branch.start, branch.whole_blocks(length))
        if partial is not None and length > branch.start:
            self._share_tail(branch, partial)
        branch.num_computed = length
        self._fall_back(branch)

    def append(self, branch: Branch, tokens: Sequence[int], *, provisional: bool = False) -> None:
        """Append tokens; the engine computes them later."""
        if provisional and branch.provisional is None:
            branch.provisional = branch.length
        if branch.block:
            branch.num_computed = min(branch.num_computed, branch.whole_blocks(branch.length))
        if branch.provisional is not None:  # provisional tokens attend to those after them
            branch.num_computed = min(branch.num_computed, branch.provisional)
            self._fall_back(branch, store=False)
        branch.tail.extend(tokens)
        branch.length += len(tokens)

    def replace(self, branch: Branch, position: int, tokens: Sequence[int]) -> None:
        """Replace provisional tokens; all provisional tokens are computed again, as they may
        attend to each other."""
        first = branch.provisional
        if first is None or position < first or position + len(tokens) > branch.length:
            raise ValueError("only provisional tokens can be replaced")
        offset = position - branch.start
        branch.tail[offset : offset + len(tokens)] = tokens
        branch.num_computed = min(branch.num_computed, first)
        self._fall_back(branch, store=False)

    def commit(self, branch: Branch, length: int | None = None) -> None:
        """Make provisional tokens final (those before `length`, if given) and share their pages."""
        branch.provisional = None if length is None or length >= branch.length else length
        self.advance(branch, branch.num_computed)

    def fork(self, branch: Branch) -> Branch:
        """Return another branch with the same past.

        Only the tokens of the unfinished page are copied. Both branches compute their provisional
        tokens again.
        """
        self._store_tail(branch)
        if branch.provisional is not None:
            branch.num_computed = min(branch.num_computed, branch.provisional)
        if self.states is not None:
            self._fall_back(branch)
            self.states.publish_tip(branch)
        other = self._new(branch.node, branch.adapter, branch.block)
        self.index.attach(other.node)
        other.start, other.length = branch.start, branch.length
        other.tail = branch.tail.copy()
        other.provisional = branch.provisional
        other.canvas_adapter = branch.canvas_adapter
        if branch.private_id:
            self.make_private(other)
        num_shared = branch.start if branch.shared_tail is None else branch.num_computed
        other.num_computed = other.num_reused = min(branch.num_computed, num_shared)
        other.owner = branch.owner
        if branch.shared_tail is not None:
            self._share_tail(other, branch.shared_tail)
        self._fall_back(other)
        return other

    def draft_fork(self, branch: Branch, tokens: Sequence[int], num_draft: int) -> Branch | None:
        """Return a branch for a side chain of a draft; None if there is no room for it.

        It has the computed tokens of `branch`, then these tokens, the last `num_draft` of which are
        draft tokens, with own pages; the prefix cache does not know it. The step of `branch`
        must be planned already: its pages and state slots are reserved.
        """
        other = self._new(branch.node, branch.adapter)
        self.index.attach(other.node)
        other.start, other.num_computed = branch.start, branch.num_computed
        if branch.private_id:
            self.make_private(other)
        other.tail = [*branch.tail[: branch.num_computed - branch.start], *tokens]
        other.length = branch.num_computed + len(tokens)
        try:
            if branch.num_computed > branch.start:
                other.pages.append(self._copy_page(branch.pages[0]))
            self.reserve(other, other.length)
            if self.states is not None:
                self.states.fork_cursor(other, branch)
                self.states.plan(other, other.length, num_draft=num_draft)
        except (OutOfPagesError, OutOfStatesError):
            self.close(other, store=False)
            return None
        return other

    def rewind(self, branch: Branch, length: int, *, store: bool = True) -> None:
        """Drop every token from `length` on; with `store`, their pages stay in the prefix cache."""
        if not 0 <= length <= branch.length:
            raise ValueError(f"cannot rewind {branch.length} tokens to {length}")
        if branch.provisional is not None:  # the remaining ones attended to what is dropped
            branch.num_computed = min(branch.num_computed, branch.provisional)
            if branch.provisional >= length:
                branch.provisional = None
        if branch.block:
            self.recompute(branch, branch.whole_blocks(length))
        self._fall_back(branch, length, store=store)
        if length < branch.start:
            self._leave_pages(branch, length, store)
            del branch.tail[length - branch.start :]
        else:
            if branch.num_computed > length:
                if store:
                    self._store_tail(branch)
                branch.num_computed = min(branch.num_computed, length)
            del branch.tail[length - branch.start :]
            self._trim(branch)
        branch.length = length

    def recompute(self, branch: Branch, first: int) -> None:
        """Keep the tokens, but compute those from `first` on again."""
        if branch.num_computed <= first:
            return
        if self.states is not None:
            self._fall_back(branch, first)
        else:
            self._discard_computed(branch, first, True)

    def close(self, branch: Branch, *, store: bool = True) -> None:
        """Release a branch; with `store`, its pages stay in the prefix cache. Idempotent."""
        if branch.closed:
            return
        branch.closed = True
        if store:
            self._store_tail(branch)
        if self.states is not None:
            if store:
                self.states.publish_tip(branch)
            self.states.seek(branch, None)
            self.states.set_running(branch, False)
        self._drop_tail(branch)
        self.index.detach(branch.node)
        if branch.slot >= 0:
            self._free_slots.append(branch.slot)
            branch.slot = -1
        if branch.adapter and not self.index.uses_adapter(branch.adapter):
            self.on_adapter_unused(branch.adapter)

    def slot_of(self, branch: Branch) -> int:
        """Return the branch's row of the block table; it gets one when it first runs."""
        if branch.slot < 0:
            if self._free_slots:
                branch.slot = self._free_slots.pop()
            else:
                branch.slot, self._slot_count = self._slot_count, self._slot_count + 1
            branch.num_table_pages = 0
        return branch.slot

    def preempt(self, branch: Branch) -> None:
        """Take all pages from a branch; it keeps its tokens, and is computed again later.

        Its full pages stay in the prefix cache until they are evicted.
        """
        tokens = branch.tokens
        if self.states is not None:
            self.states.seek(branch, None)
        self._drop_tail(branch)
        self._move(branch, self.index.root(branch.adapter, branch.block))
        branch.tail, branch.num_computed = tokens, 0

    def reserve(self, branch: Branch, length: int) -> None:
        """Give the branch own pages to write up to `length` tokens.

        A shared tail page is copied by the next step, unless no other branch needs it. Without room
        for a copy its tokens are computed again: check `branch.computed` afterwards.

        Raises:
            OutOfPagesError: Too few pages are free or evictable. None is taken then.
        """
        needed = -(-(length - branch.start) // self.page_size) - len(branch.pages)
        if needed <= 0:
            return
        lender, takes_over = branch.shared_tail, False
        if lender is not None:
            filled = branch.num_computed - branch.start
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
            self._drop_tail(branch)  # the few tokens of the shared page are computed again
            self._fall_back(branch, store=False)
            self.reserve(branch, length)
            return
        if lender is not None:
            branch.shared_tail = None
            self.index.detach(lender)
            if takes_over:
                if self.states is not None:
                    self.states.take_over(branch, lender)
                branch.pages.append(self.index.remove(lender))
            needed -= 1
        branch.pages += [self.pool.allocate() for _ in range(needed)]

    def advance(self, branch: Branch, computed: int) -> None:
        """Note that the branch is computed up to here; its full pages enter the prefix cache."""
        branch.num_computed = computed
        size, final = self.page_size, computed
        if branch.provisional is not None and branch.provisional < final:
            final = branch.provisional
        num_full, block = (final - branch.start) // size, branch.block
        while (
            block
            and num_full
            and self.index.visible_end(branch.start + (num_full - 1) * size, block) > final
        ):
            num_full -= 1  # its last block is not complete
        if num_full <= 0:
            return
        first = branch.start
        for number in range(num_full):
            page = branch.pages[number]
            chunk = tuple(branch.tail[number * size : (number + 1) * size])
            visible_end = self.index.visible_end(first + number * size, block) - first
            lookahead = tuple(branch.tail[(number + 1) * size : visible_end])
            node = self.index.insert(branch.node, chunk, page, lookahead, branch.private_id)
            if node.page != page:  # another branch had computed the same tokens
                branch.num_table_pages = min(branch.num_table_pages, branch.node.depth)
            self._move(branch, node)
            if self.states is not None:
                self.states.hand_over(branch, node, branch.start)
        if self.states is not None:
            self.states.thin(branch, num_full)
        del branch.pages[:num_full], branch.tail[: num_full * size]

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the pending page copies as (source, target) and clear them."""
        copies = [(source, target) for target, source in self.copies.items()]
        self.copies.clear()
        return copies

    # -- internals ---------------------------------------------------------------------------

    def _copy_page(self, source: int) -> int:
        """Allocate a page that the next step fills with a copy of `source`.

        A copy of a page that is itself a pending copy reads the original. The target is never the
        source of another pending copy, although that page may be free already.

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

    def _new(self, node: PageNode, adapter: int, block: int = 0) -> Branch:
        return Branch(node, adapter, block, stateful=self.states is not None)

    def _fall_back(self, branch: Branch, first: int | None = None, *, store: bool = True) -> None:
        """Go back to the last kept recurrent state, at most at `first`; the rest is computed again.

        With `store`, the branch's current state and the position it returns to stay cached.
        """
        if self.states is None or branch.state is None:
            return
        limit = branch.num_computed if first is None else min(first, branch.num_computed)
        tip = branch.state.tip
        if limit == branch.num_computed == (0 if tip is None else tip.length):
            return
        if store:
            self._store_tail(branch)
            self.states.publish_tip(branch, PAGE)
        state = self.states.nearest(branch, limit)
        length = 0 if state is None else state.length
        if store and limit - length >= self.page_size:
            branch.state.junction = limit
        self._discard_computed(branch, length, False)
        self.states.seek(branch, state)

    def _discard_computed(self, branch: Branch, first: int, store: bool) -> None:
        """Keep the tokens, but nothing that is computed from `first` on."""
        if first < branch.start:
            tokens, length = branch.tokens[first:], branch.length
            self._leave_pages(branch, first, store)
            branch.tail[first - branch.start :] = tokens
            branch.length = length
        else:
            if store:
                self._store_tail(branch)
            branch.num_computed = min(branch.num_computed, first)
            self._trim(branch)

    def _move(self, branch: Branch, node: PageNode) -> None:
        """Attach the branch to another node."""
        self.index.attach(node)
        self.index.detach(branch.node)
        branch.node, branch.start = node, node.depth * self.page_size
        branch.num_table_pages = min(branch.num_table_pages, node.depth)

    def _share_tail(self, branch: Branch, node: PageNode) -> None:
        self.index.attach(node)
        branch.shared_tail = node

    def _leave_pages(self, branch: Branch, length: int, store: bool) -> None:
        """Go back to position `length`, which is inside one of the full pages."""
        if store:
            self._store_tail(branch)
        self._drop_tail(branch)
        node, next_node = branch.node, branch.node
        while node.depth * self.page_size > length:
            assert node.parent is not None
            node, next_node = node.parent, node
        if length > node.depth * self.page_size:
            self._share_tail(branch, next_node)  # first: it keeps the page from being evicted
        self._move(branch, node)
        branch.tail = list(next_node.tokens) if branch.shared_tail is not None else []
        branch.num_computed = length

    def _trim(self, branch: Branch) -> None:
        """Release the pages after the computed tokens."""
        needed = -(-(branch.num_computed - branch.start) // self.page_size)
        if needed < len(branch.pages):
            self.pool.release(branch.pages[needed:])
            del branch.pages[needed:]
            branch.num_table_pages = min(branch.num_table_pages, branch.node.depth + needed)
        if needed == 0 and branch.shared_tail is not None:
            self.index.detach(branch.shared_tail)
            branch.shared_tail = None

    def _store_tail(self, branch: Branch) -> None:
        """Move the computed part of the unfinished page into the prefix cache, and share it."""
        filled = branch.num_computed - branch.start
        if branch.provisional is not None:
            filled = min(filled, branch.provisional - branch.start)
        filled = branch.whole_blocks(branch.start + filled) - branch.start
        if filled <= 0 or not branch.pages or (branch.block and self.page_size % branch.block):
            return
        chunk = tuple(branch.tail[: min(filled, self.page_size)])
        node = self.index.insert(branch.node, chunk, branch.pages[0], owner=branch.private_id)
        self._share_tail(branch, node)
        if self.states is not None:
            self.states.hand_over(branch, node, branch.start + len(chunk))
        self.pool.release(branch.pages[1:])
        branch.pages.clear()
        branch.num_table_pages = min(branch.num_table_pages, branch.node.depth)
        branch.num_computed = branch.start + len(chunk)

    def _drop_tail(self, branch: Branch) -> None:
        """Release everything after the full pages."""
        self.pool.release(branch.pages)
        branch.pages.clear()
        branch.num_table_pages = min(branch.num_table_pages, branch.node.depth)
        branch.num_computed = min(branch.num_computed, branch.start)
        if branch.shared_tail is not None:
            self.index.detach(branch.shared_tail)
            branch.shared_tail = None
