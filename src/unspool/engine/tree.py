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

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from unspool.backends.interventions import BranchInterventions, token_of_key
from unspool.backends.step import Logits
from unspool.engine.states import PAGE, OutOfStatesError, State, StateCursor, StatePool
from unspool.errors import UnspoolError

# -- The pool of KV-cache pages


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

    def allocate_many(self, count: int) -> list[int]:
        """Take this many free pages: no more than there are."""
        if not count:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        return pages

    def allocate(self, excluded: Collection[int] = ()) -> int:
        """Take a free page that is not among the `excluded` ones."""
        for index in range(len(self._free) - 1, -1, -1):
            if not excluded or self._free[index] not in excluded:
                return self._free.pop(index)
        raise OutOfPagesError

    def release(self, pages: Iterable[int]) -> None:
        self._free += pages


# -- The prefix cache: a radix tree whose nodes are KV-cache pages


@dataclass(slots=True, eq=False)
class PageNode:
    """One page: its tokens, and the pages that followed it in some text.

    Tokens are kept by their keys: a token that interventions touch has another key than its id
    (`BranchInterventions.keys`).
    """

    tokens: tuple[int, ...]
    page: int
    parent: PageNode | None
    depth: int  # pages from the root to here, this one included
    # By their first token (see `bucket`), then by all of their tokens.
    children: dict[int, dict[tuple[int, ...], PageNode]] = field(default_factory=dict)
    live: int = 0  # branches attached here, and children that are live
    last_used: int = 0  # when it was last live
    removed: bool = False
    # With block attention: the tokens after the page that its keys and values depend on.
    lookahead: tuple[int, ...] = ()
    # With recurrent layers: the states kept in this page, by the number of tokens read.
    states: dict[int, State] = field(default_factory=dict)
    owner: int = 0  # the private branch that computed it; 0: any branch may use it

    @property
    def bucket(self) -> int:
        """The parent's key for it: private pages have one that no search by tokens finds."""
        return -self.owner or self.tokens[0]

    @property
    def key(self) -> tuple[int, ...]:
        """All tokens that the page's content depends on, besides those of its parents."""
        return self.tokens + self.lookahead


class PrefixIndex:
    """Finds and keeps pages by the tokens that lead to them (the prefix cache)."""

    def __init__(self, pool: PagePool, page_size: int, states: StatePool | None = None) -> None:
        self._pool, self._size, self._states = pool, page_size, states
        # One tree for each adapter and block size: their keys and values differ.
        self._roots = {(0, 0): PageNode((), -1, None, 0, live=1)}
        self.pages = 0  # in the cache
        self.live_pages = 0  # of these, needed by some branch
        self.shared_pages = 0  # of these, where several branches part
        self._clock = count(1)
        # Pages to evict, as a heap by last use; some entries are outdated.
        self._candidates: list[tuple[int, int, PageNode]] = []

    def root(self, adapter: int = 0, block: int = 0) -> PageNode:
        """Return the root for texts with an adapter (0: none) and block attention (0: causal)."""
        return self._roots.setdefault((adapter, block), PageNode((), -1, None, 0, live=1))

    def drop_adapter(self, adapter: int) -> bool:
        """Make an adapter's pages unfindable; False while a branch uses the adapter.

        The pages are evicted like any others.
        """
        if self.uses_adapter(adapter):
            return False
        for key in [key for key in self._roots if key[0] == adapter]:
            del self._roots[key]
        return True

    def uses_adapter(self, adapter: int) -> bool:
        """Return whether a branch is computed with this adapter."""
        return any(root.live > 1 for key, root in self._roots.items() if key[0] == adapter)

    def match(
        self, tokens: Sequence[int], root: PageNode, block: int = 0
    ) -> tuple[PageNode, PageNode | None, int]:
        """Find the longest cached prefix below a root.

        Returns:
            The last node whose page matches whole, a node whose page matches in part (or None), and
            the number of matching tokens in all.
        """
        node, position = root, 0
        while position < len(tokens):
            siblings = node.children.get(tokens[position])
            if siblings is None:
                break
            key = tuple(tokens[position : self.visible_end(position, block)])
            child = siblings.get(key)
            if child is None and block and self._size % block:
                break  # a part of such a page may depend on tokens after it
            if child is None or len(key) < self._size:
                best = max(
                    siblings.values(), key=lambda other: _match_quality(other, key, position)
                )
                return node, best, position + _common_length(best.tokens, key)
            node, position = child, position + self._size
        return node, None, position

    def visible_end(self, position: int, block: int) -> int:
        """Return the end of what a page's tokens attend to: its end, or that of its last block."""
        end = position + self._size
        return -(-end // block) * block if block else end

    def insert(
        self,
        parent: PageNode,
        chunk: tuple[int, ...],
        page: int,
        lookahead: tuple[int, ...] = (),
        owner: int = 0,
    ) -> PageNode:
        """Add a page after `parent`; the cache owns the page from now on.

        If the same tokens are cached already, the page is released and the cached one is used. The
        caller attaches itself to the node: a page can be evicted when nothing is attached any more.

        Args:
            parent: The node of the page before.
            chunk: The tokens of the page.
            page: The page.
            lookahead: Tokens after the page that its content depends on.
            owner: The private branch (from 1 up) that alone may find the page; 0: any branch.

        Returns:
            The node that holds these tokens.
        """
        siblings = parent.children.setdefault(-owner or chunk[0], {})
        existing = siblings.get(chunk + lookahead) if siblings else None
        if existing is None and len(chunk) < self._size:  # perhaps as the start of another page
            existing = next((n for n in siblings.values() if n.tokens[: len(chunk)] == chunk), None)
        if existing is not None:
            self._pool.release((page,))
            return existing
        for child in siblings.values():
            filled = len(child.tokens)
            if filled < self._size and child.tokens == chunk[:filled]:  # the new page has more
                del siblings[child.key]
                self._pool.release((child.page,))
                child.page, child.tokens = page, chunk
                siblings[chunk] = child
                return child
        node = PageNode(chunk, page, parent, parent.depth + 1, lookahead=lookahead, owner=owner)
        siblings[node.key if lookahead else chunk] = node
        self.pages += 1
        return node

    # -- reference counts --------------------------------------------------------------------

    def attach(self, node: PageNode) -> None:
        """Attach a branch: neither the node nor its ancestors can be evicted."""
        while True:
            node.live += 1
            if node.live > 1 or node.parent is None:
                break
            self.live_pages += 1
            node = node.parent
        self.shared_pages += node.live == 2 and node.parent is not None

    def detach(self, node: PageNode) -> None:
        while True:
            node.live -= 1
            if node.live > 0 or node.parent is None:
                break
            self.live_pages -= 1
            self._mark_unused(node)
            node = node.parent
        self.shared_pages -= node.live == 1 and node.parent is not None

    @property
    def evictable(self) -> int:
        return self.pages - self.live_pages

    def evict(self, num_pages: int) -> int:
        """Free the least recently used pages that no branch needs; return how many were freed."""
        num_freed = 0
        while num_freed < num_pages and self._candidates:
            last_used, _, node = heapq.heappop(self._candidates)
            if node.removed or node.live or node.children or node.last_used != last_used:
                continue  # removed, needed again, or not a leaf
            self._pool.release((self.remove(node),))
            num_freed += 1
        return num_freed

    def clear(self) -> None:
        """Evict everything that no branch needs."""
        self.evict(self.pages)

    def remove(self, node: PageNode) -> int:
        """Remove a leaf and return its page, which the caller owns now."""
        parent = node.parent
        assert parent is not None and not node.children
        siblings = parent.children[node.bucket]
        del siblings[node.key]
        if not siblings:
            del parent.children[node.bucket]
        node.removed = True
        if node.states and self._states is not None:
            self._states.drop_page(node)
        self.pages -= 1
        if not parent.live and not parent.children:
            self._add_candidate(parent)
        return node.page

    def _mark_unused(self, node: PageNode) -> None:
        """Note that no branch needs the node."""
        node.last_used = next(self._clock)
        if not node.children:
            self._add_candidate(node)

    def _add_candidate(self, node: PageNode) -> None:
        heapq.heappush(self._candidates, (node.last_used, id(node), node))
        if len(self._candidates) > 64 + 4 * self.pages:  # mostly outdated: filter them
            current = {
                id(n): (last_used, i, n)
                for last_used, i, n in self._candidates
                if not (n.removed or n.live or n.children) and n.last_used == last_used
            }
            self._candidates = list(current.values())
            heapq.heapify(self._candidates)


def _match_quality(node: PageNode, tokens: tuple[int, ...], position: int) -> tuple[int, int]:
    """Rate a page at `position` that matches in part: its last usable state, and its tokens."""
    num_shared = _common_length(node.tokens, tokens)
    usable = (length for length in node.states if length <= position + num_shared)
    return max(usable, default=0), num_shared


def _common_length(stored: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """Return how many first tokens are the same."""
    num_shared = 0
    for cached, token in zip(stored, tokens, strict=False):
        if cached != token:
            break
        num_shared += 1
    return num_shared


# -- A branch: one path through the tree of tokens, and its pages in the KV cache


class BranchOwner(Protocol):
    """What computes branches: the engine."""

    def extend(self, branch: Branch, tokens: Sequence[int] = ()) -> Logits: ...

    def fork(self, branch: Branch) -> Branch: ...

    def rewind(self, branch: Branch, length: int) -> None: ...

    def release(self, branch: Branch) -> None: ...

    def save(self, branch: Branch, path: str | Path) -> None: ...


class Branch:
    """A text: its tokens, and the pages with their keys and values."""

    __slots__ = (
        "adapter",
        "block",
        "canvas_adapter",
        "closed",
        "interventions",
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
        self,
        root: PageNode,
        adapter: int = 0,
        block: int = 0,
        interventions: BranchInterventions | None = None,
        *,
        stateful: bool = False,
    ) -> None:
        self.node = root  # the last full page, in the prefix cache
        self.interventions = interventions  # what is changed inside the model; None: nothing
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
        self.closed = False  # whether it was released
        # Not 0 if hooks changed its activations: then its pages are not shared.
        self.private_id = 0
        self.slot = -1  # its row of the block table
        self.num_table_pages = 0  # pages that are up to date in that row
        self.state = StateCursor(self) if stateful else None  # its recurrent state
        self.owner: BranchOwner | None = None  # the engine that computes it

    def __len__(self) -> int:
        return self.length

    @property
    def tokens(self) -> list[int]:
        """All tokens of the text."""
        parts, node = [self.tail], self.node
        while node.parent is not None:
            parts.append(list(node.tokens))
            node = node.parent
        tokens = [token for part in reversed(parts) for token in part]
        return tokens if self.interventions is None else list(map(token_of_key, tokens))

    def keys(self, tokens: Sequence[int], start: int) -> Sequence[int]:
        """Return what the prefix cache finds tokens from position `start` on by."""
        return tokens if self.interventions is None else self.interventions.keys(tokens, start)

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

    def save(self, path: str | Path) -> None:
        """Write the tokens and what is computed of them to a file, for `lm.open`."""
        self._owner().save(self, path)

    def _owner(self) -> BranchOwner:
        assert self.owner is not None, "the branch was not opened by an engine"
        return self.owner


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
        self,
        tokens: Sequence[int],
        cached: bool = True,
        adapter: int = 0,
        block: int = 0,
        interventions: BranchInterventions | None = None,
    ) -> Branch:
        """Open a branch with these tokens; cached pages are used unless `cached` is False."""
        branch = self._new(self.index.root(adapter, block), adapter, block, interventions)
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
            branch.keys(branch.tail[: max(0, branch.whole_blocks(max_reused))], 0), root, block
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
        other = self._new(branch.node, branch.adapter, branch.block, branch.interventions)
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
        other = self._new(branch.node, branch.adapter, interventions=branch.interventions)
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
        branch.pages += self.pool.allocate_many(needed)

    def advance(self, branch: Branch, computed: int) -> None:
        """Note that the branch is computed up to here; its full pages enter the prefix cache."""
        branch.num_computed = computed
        size, final = self.page_size, computed
        if computed - branch.start < size:
            return
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
        first, node, added = branch.start, branch.node, list[PageNode]()
        keys = branch.keys(branch.tail, first)
        for number in range(num_full):
            page, end = branch.pages[number], (number + 1) * size
            chunk = tuple(keys[number * size : end])
            lookahead: tuple[int, ...] = ()
            if block:
                visible_end = self.index.visible_end(first + number * size, block) - first
                lookahead = tuple(keys[end:visible_end])
            node = self.index.insert(node, chunk, page, lookahead, branch.private_id)
            added.append(node)
            if node.page != page:  # another branch had computed the same tokens
                branch.num_table_pages = min(branch.num_table_pages, node.depth - 1)
        self.index.attach(node)
        self.index.detach(branch.node)
        branch.node, branch.start = node, first + num_full * size
        del branch.pages[:num_full], branch.tail[: num_full * size]
        if self.states is not None:
            for node in added:
                self.states.hand_over(branch, node, node.depth * size)
            self.states.thin(branch, num_full)

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

    def _new(
        self,
        node: PageNode,
        adapter: int,
        block: int = 0,
        interventions: BranchInterventions | None = None,
    ) -> Branch:
        return Branch(node, adapter, block, interventions, stateful=self.states is not None)

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
        branch.tail = []
        if branch.shared_tail is not None:
            branch.tail = list(map(token_of_key, next_node.tokens))
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
        chunk = tuple(branch.keys(branch.tail[: min(filled, self.page_size)], branch.start))
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
