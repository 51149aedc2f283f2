"""The prefix cache: a radix tree whose nodes are KV-cache pages.

A text that starts like an earlier one finds the pages on the way down from the root, token by
token; where only a part of a page matches, that part is copied. Branches are attached to nodes of
this tree, so texts with the same prefix share its pages. Pages that no branch needs stay until room
is needed; the least recently used are evicted first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from unspool.engine.pages import PagePool
from unspool.engine.standing import State
from unspool.engine.states import StatePool


@dataclass(slots=True, eq=False)
class PageNode:
    """One page: its tokens, and the pages that followed it in some text."""

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

    def all_children(self) -> Iterator[PageNode]:
        for same_start in self.children.values():
            yield from same_start.values()


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

        If the same tokens are cached already, the page is released and the cached one is used.

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
        existing = siblings.get(chunk + lookahead)
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
        siblings[node.key] = node
        self.pages += 1
        self._mark_unused(node)
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
