"""The prefix index: a tree whose nodes are pages of computed tokens.

A text that begins like one computed before finds the pages on the way down from the root, token by
token: where only a part of a page fits, that part is copied. Branches stand at nodes of this tree,
so texts that share a beginning share its pages. What no branch needs is kept until its room is
needed; the least recently used goes first.
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
class Node:
    """One page: the tokens in it, and the pages that followed it in some text."""

    tokens: tuple[int, ...]
    page: int
    parent: Node | None
    depth: int  # pages from the root to here, this one included
    # By their first token (see `bucket`), then by all of them.
    children: dict[int, dict[tuple[int, ...], Node]] = field(default_factory=dict)
    live: int = 0  # branches that stand here, and children that are live
    used: int = 0  # when it was last live
    removed: bool = False
    # Where tokens see ahead, what they depend on beyond the page: the rest of its last block.
    ahead: tuple[int, ...] = ()
    # Of models with recurrent layers: the states in this page that are kept, by how many tokens of
    # the text they have read.
    states: dict[int, State] = field(default_factory=dict)
    owner: int = 0  # the private branch that computed it; 0: any branch may use it

    @property
    def bucket(self) -> int:
        """Where the parent has it: private pages where no search for tokens comes."""
        return -self.owner or self.tokens[0]

    @property
    def key(self) -> tuple[int, ...]:
        """All tokens that the page's numbers depend on, besides those of its parents."""
        return self.tokens + self.ahead

    def all_children(self) -> Iterator[Node]:
        for same_start in self.children.values():
            yield from same_start.values()


class PrefixIndex:
    """Finds and keeps pages by the tokens that lead to them."""

    def __init__(self, pool: PagePool, page_size: int, states: StatePool | None = None) -> None:
        self._pool, self._size, self._states = pool, page_size, states
        # What is computed with an adapter serves nobody else, nor what was read in blocks of a
        # size: each has a tree of its own.
        self._roots = {(0, 0): Node((), -1, None, 0, live=1)}
        self.pages = 0  # in the index
        self.live_pages = 0  # of these, needed by some branch
        self.shared_pages = 0  # of these, where several of them part
        self._clock = count(1)
        self._candidates: list[tuple[int, int, Node]] = []  # to evict; some entries are outdated

    def root(self, adapter: int = 0, block: int = 0) -> Node:
        """Where the texts with an adapter begin (0: those without one) whose tokens see to the end
        of their block (0: whose tokens see back)."""
        return self._roots.setdefault((adapter, block), Node((), -1, None, 0, live=1))

    def forget(self, adapter: int) -> bool:
        """Let nobody find what was computed with an adapter; False while a branch needs it. The
        pages are evicted like any others."""
        if self.needs(adapter):
            return False
        for key in [key for key in self._roots if key[0] == adapter]:
            del self._roots[key]
        return True

    def needs(self, adapter: int) -> bool:
        """Whether a branch is computed with this adapter."""
        return any(root.live > 1 for key, root in self._roots.items() if key[0] == adapter)

    def match(
        self, tokens: Sequence[int], root: Node, block: int = 0
    ) -> tuple[Node, Node | None, int]:
        """The longest stored prefix below a root: the last whole page, a page that fits in part,
        and how many tokens that is in all."""
        node, at = root, 0
        while at < len(tokens):
            siblings = node.children.get(tokens[at])
            if siblings is None:
                break
            page = tuple(tokens[at : self.reach(at, block)])
            child = siblings.get(page)
            if child is None and block and self._size % block:
                break  # a part of such a page may depend on what lies behind it
            if child is None or len(page) < self._size:
                best = max(siblings.values(), key=lambda other: _fit(other, page, at))
                return node, best, at + _common(best.tokens, page)
            node, at = child, at + self._size
        return node, None, at

    def reach(self, at: int, block: int) -> int:
        """How far the tokens of the page at this position see: to its end, or to the end of the
        block in which it ends."""
        end = at + self._size
        return -(-end // block) * block if block else end

    def insert(
        self,
        parent: Node,
        chunk: tuple[int, ...],
        page: int,
        ahead: tuple[int, ...] = (),
        owner: int = 0,
    ) -> Node:
        """The node for a page behind `parent`; the page is the index's from now on. `ahead` are
        tokens behind the page that its numbers depend on. A page with an `owner` (from 1 up) is
        found by nobody else.

        If all of its tokens are known already, the page is given back, and the known one serves.
        """
        siblings = parent.children.setdefault(-owner or chunk[0], {})
        known = siblings.get(chunk + ahead)
        if known is None and len(chunk) < self._size:  # perhaps as the beginning of another
            known = next((n for n in siblings.values() if n.tokens[: len(chunk)] == chunk), None)
        if known is not None:
            self._pool.release((page,))
            return known
        for child in siblings.values():
            held = len(child.tokens)
            if held < self._size and child.tokens == chunk[:held]:  # known in part: more now
                del siblings[child.key]
                self._pool.release((child.page,))
                child.page, child.tokens = page, chunk
                siblings[chunk] = child
                return child
        node = Node(chunk, page, parent, parent.depth + 1, ahead=ahead, owner=owner)
        siblings[node.key] = node
        self.pages += 1
        self._cached(node)
        return node

    # -- who needs which page ----------------------------------------------------------------

    def attach(self, node: Node) -> None:
        """A branch stands at this node: neither it nor what leads to it can be evicted."""
        while True:
            node.live += 1
            if node.live > 1 or node.parent is None:
                break
            self.live_pages += 1
            node = node.parent
        self.shared_pages += node.live == 2 and node.parent is not None

    def detach(self, node: Node) -> None:
        while True:
            node.live -= 1
            if node.live > 0 or node.parent is None:
                break
            self.live_pages -= 1
            self._cached(node)
            node = node.parent
        self.shared_pages -= node.live == 1 and node.parent is not None

    @property
    def evictable(self) -> int:
        return self.pages - self.live_pages

    def evict(self, wanted: int) -> int:
        """Free the least recently used pages that no branch needs; how many were freed."""
        freed = 0
        while freed < wanted and self._candidates:
            used, _, node = heapq.heappop(self._candidates)
            if node.removed or node.live or node.children or node.used != used:
                continue  # gone, needed again, or not a leaf
            self._pool.release((self.take_out(node),))
            freed += 1
        return freed

    def clear(self) -> None:
        """Evict everything that no branch needs."""
        self.evict(self.pages)

    def take_out(self, node: Node) -> int:
        """Remove a leaf; its page is the caller's."""
        parent = node.parent
        assert parent is not None and not node.children
        siblings = parent.children[node.bucket]
        del siblings[node.key]
        if not siblings:
            del parent.children[node.bucket]
        node.removed = True
        if node.states and self._states is not None:
            self._states.leave_page(node)
        self.pages -= 1
        if not parent.live and not parent.children:
            self._queue(parent)
        return node.page

    def _cached(self, node: Node) -> None:
        """No branch needs the node (any more)."""
        node.used = next(self._clock)
        if not node.children:
            self._queue(node)

    def _queue(self, node: Node) -> None:
        heapq.heappush(self._candidates, (node.used, id(node), node))
        if len(self._candidates) > 64 + 4 * self.pages:  # mostly outdated: sort them out
            fresh = {
                id(n): (used, i, n)
                for used, i, n in self._candidates
                if not (n.removed or n.live or n.children) and n.used == used
            }
            self._candidates = list(fresh.values())
            heapq.heapify(self._candidates)


def _fit(node: Node, tokens: tuple[int, ...], at: int) -> tuple[int, int]:
    """How well a page at this position fits that does not fit as a whole: up to which state, and
    how many tokens."""
    shared = _common(node.tokens, tokens)
    if not node.states:
        return 0, shared
    return max((place for place in node.states if place <= at + shared), default=0), shared


def _common(stored: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """How many tokens two runs share from their beginnings."""
    shared = 0
    for one, other in zip(stored, tokens, strict=False):
        if one != other:
            break
        shared += 1
    return shared
