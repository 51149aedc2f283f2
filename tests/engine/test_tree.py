"""The tree of tokens under arbitrary use: no page lost, none shared by mistake."""

from __future__ import annotations

from collections import Counter

import null_model
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from unspool.engine.pages import OutOfPagesError, PagePool
from unspool.engine.prefixes import PrefixIndex
from unspool.engine.tree import Branch, Tree
from unspool.errors import UnspoolError

SIZE = null_model.PAGE_SIZE
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=11)  # few kinds: prefixes often meet


def nodes(index: PrefixIndex):
    waiting = list(index._root.all_children())
    while waiting:
        node = waiting.pop()
        waiting.extend(node.all_children())
        yield node


class TreeMachine(RuleBasedStateMachine):
    """Open, extend, fork, rewind, put aside, close and forget, in any order."""

    branches = Bundle("branches")

    @initialize(pages=st.integers(6, 30))
    def begin(self, pages: int) -> None:
        self.memory = np.full((pages, SIZE), -1)
        self.tree = Tree(pages, SIZE, self._copy)
        self.open: list[Branch] = []

    def _copy(self, source: int, target: int) -> None:
        self.memory[target] = self.memory[source]

    def _compute(self, branch: Branch, length: int) -> None:
        """What the engine and a backend do: reserve, write, say that it is done."""
        try:
            self.tree.reserve(branch, length)
        except OutOfPagesError:
            return
        for position in range(branch.computed, length):
            page = branch.pages[position // SIZE]
            assert self.tree.pool.holders(page) == 1 or position % SIZE == 0, "writes are private"
            self.memory[page, position % SIZE] = branch.tokens[position]
        self.tree.computed(branch, length)

    @rule(target=branches, tokens=TOKENS)
    def open_branch(self, tokens: list[int]) -> Branch:
        branch = self.tree.open(tokens)
        assert branch.reused <= len(tokens) - 1
        self.open.append(branch)
        return branch

    @rule(branch=branches, tokens=TOKENS, part=st.floats(0, 1))
    def extend(self, branch: Branch, tokens: list[int], part: float) -> None:
        self.tree.append(branch, tokens)
        left = len(branch.tokens) - branch.computed
        self._compute(branch, branch.computed + int(left * part))

    @rule(branch=branches)
    def finish(self, branch: Branch) -> None:
        self._compute(branch, len(branch.tokens))

    @rule(target=branches, branch=branches)
    def fork(self, branch: Branch) -> Branch:
        free = self.tree.pool.free
        other = self.tree.fork(branch)
        assert self.tree.pool.free == free, "a fork copies nothing"
        self.open.append(other)
        return other

    @rule(branch=branches, part=st.floats(0, 1))
    def rewind(self, branch: Branch, part: float) -> None:
        self.tree.rewind(branch, int(len(branch.tokens) * part))
        if not branch.tokens:
            self.tree.append(branch, [0])

    @rule(branch=branches, part=st.floats(0, 1))
    def unwind(self, branch: Branch, part: float) -> None:
        tokens = list(branch.tokens)
        self.tree.unwind(branch, int(len(tokens) * part))
        assert branch.tokens == tokens

    @rule(branch=branches, part=st.floats(0, 1))
    def drop_a_draft(self, branch: Branch, part: float) -> None:
        """What the engine does with wrong guesses: not worth storing."""
        keep = max(1, int(len(branch.tokens) * part))
        branch.computed = min(branch.computed, keep)
        self.tree.rewind(branch, keep)

    @rule(branch=branches)
    def put_aside(self, branch: Branch) -> None:
        self.tree.put_aside(branch)
        self.tree.adopt(branch)

    @rule(branch=consumes(branches))
    def close(self, branch: Branch) -> None:
        self.tree.close(branch)
        self.open.remove(branch)

    @rule(count=st.integers(1, 5))
    def forget(self, count: int) -> None:
        before = self.tree.pool.free
        freed = self.tree.index.forget(count)
        assert self.tree.pool.free == before + freed

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "tree"):
            return
        held = Counter(page for branch in self.open for page in branch.pages)
        held.update(node.page for node in nodes(self.tree.index))
        pool = self.tree.pool
        assert {p: pool.holders(p) for p in range(pool.count) if pool.holders(p)} == dict(held)
        assert pool.free == pool.count - len(held)
        assert self.tree.index.pages == sum(1 for _ in nodes(self.tree.index))

    @invariant()
    def pages_hold_what_they_should(self) -> None:
        if not hasattr(self, "tree"):
            return
        for branch in self.open:
            stored = self.memory[branch.pages].reshape(-1)[: branch.computed]
            assert stored.tolist() == branch.tokens[: branch.computed]
            assert len(branch.logprobs) == len(branch.tokens)
        seen = [node.page for node in nodes(self.tree.index)]
        assert len(seen) == len(set(seen)), "a page stands in one place only"
        for node in nodes(self.tree.index):
            assert tuple(self.memory[node.page, : len(node.tokens)]) == node.tokens

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            for branch in self.open:
                self.tree.close(branch)
            self.tree.index.forget_all()
            assert self.tree.pool.used == 0


TreeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTree = TreeMachine.TestCase


def computed(tree: Tree, tokens: list[int]) -> Branch:
    branch = tree.open(tokens)
    tree.reserve(branch, len(tokens))
    tree.computed(branch, len(tokens))
    return branch


def test_the_longest_prefix_is_found_to_the_token():
    tree = Tree(32, SIZE, lambda source, target: None)
    tree.close(computed(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
    tree.close(computed(tree, [1, 2, 3, 4, 5, 6, 0, 0]))
    assert tree.open([1, 2, 3, 4, 5, 6, 7, 9, 9]).reused == 7
    assert tree.open([1, 2, 3, 4, 5, 6, 0, 7, 7]).reused == 7
    assert tree.open([1, 2, 9]).reused == 2
    assert tree.open([7, 1]).reused == 0
    whole = tree.open([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert (whole.reused, whole.missed_from) == (9, None), "the last token is always computed"
    part = tree.open([1, 2, 3, 4, 0, 0, 0, 0])
    assert (part.reused, part.missed_from) == (4, 4)


def test_running_texts_share_whole_pages_before_they_end():
    tree = Tree(32, SIZE, lambda source, target: None)
    computed(tree, [1, 2, 3, 4, 5, 6])
    assert tree.open([1, 2, 3, 4, 5, 6, 7]).reused == 4


def test_the_least_recently_used_goes_first():
    tree = Tree(4, SIZE, lambda source, target: None)
    for start in (10, 20, 30, 40):
        tree.close(computed(tree, [start, 1, 2, 3]))
    tree.close(tree.open([10, 1, 2, 3, 4]))  # used again
    tree.close(computed(tree, [50, 1, 2, 3]))  # needs room
    assert tree.open([10, 1, 2, 3, 4]).reused == 4
    assert tree.open([20, 1, 2, 3, 4]).reused == 0


def test_a_full_pool_says_so():
    pool = PagePool(1)
    pool.take()
    with pytest.raises(OutOfPagesError):
        pool.take()
    with pytest.raises(UnspoolError, match="too few"):
        PagePool(0)


def test_fork_and_rewind_cost_nothing_however_long_the_text():
    """Counted in pages, not in seconds: nothing is copied, nothing is computed."""
    copies: list[int] = []
    tree = Tree(4000, SIZE, lambda source, target: copies.append(target))
    branch = computed(tree, list(range(10_000)))
    used = tree.pool.used
    forks = [tree.fork(branch) for _ in range(50)]
    assert tree.pool.used == used and not copies
    tree.rewind(forks[0], 5001)
    tree.append(forks[0], [1])
    tree.reserve(forks[0], 5002)
    assert len(copies) == 1, "one partly filled page is copied when one side writes"
