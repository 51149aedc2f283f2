"""The index of computed prefixes: which pages hold the keys and values of which tokens.

A tree whose nodes are pages. A text that begins like one computed before finds the pages on the
way down from the root, token by token: where only a part of a page fits, that part is copied.
What nobody uses is kept until its room is needed; the least recently used goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from unspool.engine.pages import PagePool


@dataclass(slots=True, eq=False)
class Node:
    """One page: the tokens in it, and the pages that followed it in some text."""

    tokens: tuple[int, ...]
    page: int
    parent: Node | None
    children: dict[int, list[Node]] = field(default_factory=dict)  # by their first token
    used: int = 0  # when it was last looked at
    alive: bool = True

    def all_children(self) -> Iterator[Node]:
        for same_start in self.children.values():
            yield from same_start


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a text."""

    pages: tuple[int, ...]  # whole pages
    partial: int | None  # a page of which the first tokens fit too
    tokens: int  # how many tokens that is in all
    node: Node | None  # the last of the whole pages


class PrefixIndex:
    """Finds and keeps pages by the tokens that lead to them. It holds each page once."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._size = pool, page_size
        self._root = Node((), -1, None)
        self._clock = count(1)
        self._oldest: list[tuple[int, int, Node]] = []  # leaves, with out-of-date entries among
        self.pages = 0

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest prefix of `tokens` whose pages are here."""
        node, at = self._root, 0
        found: list[int] = []
        while True:
            best, shared = None, 0
            for child in node.children.get(tokens[at], []) if at < len(tokens) else []:
                same = _common(child.tokens, tokens, at)
                if same > shared:
                    best, shared = child, same
            if best is None:
                return Match(tuple(found), None, at, self._known(node))
            self._touch(best)
            at += shared
            if shared < self._size:
                return Match(tuple(found), best.page, at, self._known(node))
            found.append(best.page)
            node = best

    def add(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        length: int,
        below: Node | None = None,
        skip: int = 0,
    ) -> Node | None:
        """Remember that `pages` hold the first `length` tokens; what is known is left alone.

        The first `skip` pages are known to end at the node `below`. Gives the last whole page.
        """
        if below is None or not below.alive:
            below, skip = self._root, 0
        node = below
        for number in range(skip, -(-length // self._size)):
            start = number * self._size
            chunk = tuple(tokens[start : min(start + self._size, length)])
            known = self._add_page(node, chunk, pages[number])
            self._touch(known)
            if len(known.tokens) < self._size or len(chunk) < self._size:
                break  # nothing can follow a page that is not full
            node = known
        return self._known(node)

    def _add_page(self, parent: Node, chunk: tuple[int, ...], page: int) -> Node:
        same = parent.children.setdefault(chunk[0], [])
        for child in same:
            shared = _common(child.tokens, chunk, 0)
            if shared == len(chunk):  # all of it is known
                return child
            if shared == len(child.tokens) and not child.children:  # known in part: more now
                self._pool.hold([page])
                self._pool.let_go([child.page])
                child.page, child.tokens = page, chunk
                return child
        self._pool.hold([page])
        known = Node(chunk, page, parent)
        same.append(known)
        self.pages += 1
        return known

    def _known(self, node: Node) -> Node | None:
        return None if node is self._root else node

    def forget(self, wanted: int) -> int:
        """Let go of least recently used pages that nobody else holds; how many became free."""
        freed, spared = 0, []
        while freed < wanted and self._oldest:
            entry = heapq.heappop(self._oldest)
            used, _, node = entry
            if not node.alive or node.used != used or node.children:
                continue  # gone, used since, or not a leaf any more
            if self._pool.holders(node.page) > 1:
                spared.append(entry)  # a running text has it: letting go would free nothing
                continue
            self._remove(node)
            freed += 1
        for entry in spared:
            heapq.heappush(self._oldest, entry)
        return freed

    def forget_all(self) -> None:
        """Let go of every page."""
        waiting = list(self._root.all_children())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.all_children())
            node.alive = False
            self._pool.let_go([node.page])
        self._root.children.clear()
        self._oldest.clear()
        self.pages = 0

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        siblings = parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.children[node.tokens[0]]
        node.alive = False
        self._pool.let_go([node.page])
        self.pages -= 1
        if parent is not self._root and not parent.children:
            heapq.heappush(self._oldest, (parent.used, id(parent), parent))

    def _touch(self, node: Node) -> None:
        node.used = next(self._clock)
        heapq.heappush(self._oldest, (node.used, id(node), node))
        if len(self._oldest) > 64 + 4 * self.pages:  # mostly out-of-date entries: sort them out
            fresh = {id(n): (u, i, n) for u, i, n in self._oldest if n.alive and n.used == u}
            self._oldest = list(fresh.values())
            heapq.heapify(self._oldest)


def _common(stored: tuple[int, ...], tokens: Sequence[int], at: int) -> int:
    """How many tokens two runs share from their beginnings."""
    shared = 0
    for one, other in zip(stored, tokens[at : at + len(stored)], strict=False):
        if one != other:
            break
        shared += 1
    return shared
