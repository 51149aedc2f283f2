"""The tree of tokens under arbitrary use: no page lost, none shared by mistake."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from helpers import null_model
from unspool.backends.interventions import Intervention, Scale, resolve, token_of_key
from unspool.engine.tree import Branch, OutOfPagesError, PagePool, PrefixIndex, Tree
from unspool.errors import UnspoolError

SIZE = null_model.PAGE_SIZE
ADAPTERS = (0, 1, 2)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=11)  # few kinds: prefixes often meet


SCALES = [
    Intervention("mlp_out", Scale(0), positions=p) for p in ("all", slice(5, None), range(2, 7))
]
# Interventions of a branch: touching all tokens, those from 5 on, a few; and two at a time.
STEERED = [
    None,
    *(resolve(chosen, 3) for chosen in ((s,) for s in SCALES)),
    resolve((SCALES[0], SCALES[2]), 3),
]


def mark(key: int) -> int:
    """A number for a token and the interventions that touch it."""
    return token_of_key(key) + 100 * ((key >> 32) % 1000003)


def children(node):
    return [child for same_start in node.children.values() for child in same_start.values()]


def nodes(index: PrefixIndex):
    waiting = [child for adapter in ADAPTERS for child in children(index.root(adapter))]
    while waiting:
        node = waiting.pop()
        waiting.extend(children(node))
        yield node


class TreeMachine(RuleBasedStateMachine):
    """Open, extend, fork, rewind, replace, commit, preempt, close and evict, in any order."""

    branches = Bundle("branches")

    @initialize(pages=st.integers(6, 30))
    def begin(self, pages: int) -> None:
        self.memory = np.full((pages, SIZE), -1)
        self.tree = Tree(pages, SIZE)
        self.texts: dict[Branch, list[int]] = {}  # what the tokens should be
        self.table: dict[tuple[int, int], int] = {}  # what a backend would know of the pages

    def _compute(self, branch: Branch, length: int) -> None:
        """What the engine and a backend do: reserve, copy, write, say that it is done."""
        try:
            self.tree.reserve(branch, length)
        except OutOfPagesError:
            return
        for source, target in self.tree.take_copies():
            self.memory[target] = self.memory[source]
        slot, column = self.tree.slot_of(branch), branch.num_table_pages
        for page in branch.pages_from(column):
            self.table[slot, column] = page
            column += 1
        branch.num_table_pages = column
        shared = {node.page for node in nodes(self.tree.index)}
        for position in range(branch.num_computed, length):
            page = self.table[slot, position // SIZE]
            assert page not in shared, "writes are private"
            token = branch.tail[position - branch.start]
            (key,) = branch.keys([token], position)
            self.memory[page, position % SIZE] = mark(key) + 10 * branch.adapter
        self.tree.advance(branch, length)

    @rule(
        target=branches,
        tokens=TOKENS,
        cached=st.booleans(),
        adapter=st.sampled_from(ADAPTERS),
        steered=st.sampled_from(STEERED),
    )
    def open_branch(self, tokens: list[int], cached: bool, adapter: int, steered: Any) -> Branch:
        branch = self.tree.open(tokens, cached, adapter, interventions=steered)
        assert branch.num_reused <= (len(tokens) - 1 if cached else 0)
        self.texts[branch] = list(tokens)
        return branch

    @rule(branch=branches, tokens=TOKENS, part=st.floats(0, 1), provisional=st.booleans())
    def extend(self, branch: Branch, tokens: list[int], part: float, provisional: bool) -> None:
        self.tree.append(branch, tokens, provisional=provisional)
        self.texts[branch] += tokens
        remaining = branch.length - branch.num_computed
        self._compute(branch, branch.num_computed + int(remaining * part))

    @rule(branch=branches)
    def finish(self, branch: Branch) -> None:
        self._compute(branch, branch.length)

    @rule(branch=branches, part=st.floats(0, 1), tokens=TOKENS)
    def replace(self, branch: Branch, part: float, tokens: list[int]) -> None:
        first = branch.provisional
        if first is None:
            with pytest.raises(ValueError, match="provisional"):
                self.tree.replace(branch, branch.length - 1, [0])
            return
        position = first + int((branch.length - first) * part)
        tokens = tokens[: branch.length - position]
        self.tree.replace(branch, position, tokens)
        self.texts[branch][position : position + len(tokens)] = tokens

    @rule(branch=branches)
    def commit(self, branch: Branch) -> None:
        self.tree.commit(branch)

    @rule(target=branches, branch=branches)
    def fork(self, branch: Branch) -> Branch:
        self.tree.commit(branch)
        free = self.tree.pool.free
        other = self.tree.fork(branch)
        assert self.tree.pool.free >= free and not self.tree.copies, "a fork copies nothing"
        assert other.num_computed == branch.num_computed
        self.texts[other] = list(self.texts[branch])
        return other

    @rule(branch=branches, part=st.floats(0, 1), store=st.booleans())
    def rewind(self, branch: Branch, part: float, store: bool) -> None:
        length = int(branch.length * part)
        self.tree.rewind(branch, length, store=store)
        del self.texts[branch][length:]
        if not branch.length:
            self.tree.append(branch, [0])
            self.texts[branch] = [0]

    @rule(branch=branches, part=st.floats(0, 1))
    def recompute(self, branch: Branch, part: float) -> None:
        first = int(branch.length * part)
        self.tree.recompute(branch, first)
        assert branch.num_computed <= first

    @rule(branch=branches)
    def preempt(self, branch: Branch) -> None:
        self.tree.preempt(branch)
        assert branch.num_computed == 0 and not branch.pages
        self.tree.adopt(branch)

    @rule(branch=consumes(branches), store=st.booleans())
    def close(self, branch: Branch, store: bool) -> None:
        self.tree.close(branch, store=store)
        del self.texts[branch]

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        before, evictable = self.tree.pool.free, self.tree.index.evictable
        freed = self.tree.index.evict(count)
        assert self.tree.pool.free == before + freed
        assert freed == min(count, evictable), "all that nobody needs can be evicted"

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        tree = self.tree
        held_pages = [page for branch in self.texts for page in branch.pages]
        held_pages += [node.page for node in nodes(tree.index)]
        assert len(held_pages) == len(set(held_pages))
        assert tree.pool.free == tree.pool.count - len(held_pages)
        assert tree.index.pages == sum(1 for _ in nodes(tree.index))

    @invariant()
    def what_branches_need_is_live(self) -> None:
        stands = Counter(branch.node for branch in self.texts)
        stands.update(branch.shared_tail for branch in self.texts if branch.shared_tail is not None)
        live = 0
        for node in nodes(self.tree.index):
            assert node.live == stands[node] + sum(c.live > 0 for c in children(node))
            assert len(node.tokens) == SIZE or not node.children
            live += node.live > 0
        assert self.tree.index.live_pages == live
        parting = [node for node in nodes(self.tree.index) if node.live > 1]
        assert self.tree.index.shared_pages == len(parting)

    @invariant()
    def pages_hold_what_they_should(self) -> None:
        for branch, text in self.texts.items():
            assert branch.tokens == text and branch.length == len(text)
            pages = branch.pages_from(0)
            if branch.shared_tail is not None:
                assert not branch.pages
                pages.append(branch.shared_tail.page)
            stored = self.memory[pages].reshape(-1)[: branch.num_computed]
            # What was computed with another adapter or intervention would be other numbers.
            keys = branch.keys(text[: branch.num_computed], 0)
            assert stored.tolist() == [mark(key) + 10 * branch.adapter for key in keys]
            table_pages = [self.table[branch.slot, c] for c in range(branch.num_table_pages)]
            assert table_pages == pages[: branch.num_table_pages], (
                "the block table is right as far as it is said"
            )
            if branch.provisional is not None:
                assert branch.start <= branch.provisional, "what may change is found by nobody"
        for node in nodes(self.tree.index):
            marks = self.memory[node.page, : len(node.tokens)] // 100 * 100
            marks += self.memory[node.page, : len(node.tokens)] % 10
            assert marks.tolist() == [mark(key) for key in node.tokens]

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            for branch in self.texts:
                self.tree.close(branch)
            self.tree.index.clear()
            assert self.tree.pool.used == 0


TreeMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTree = TreeMachine.TestCase


def computed(tree: Tree, tokens: list[int]) -> Branch:
    branch = tree.open(tokens)
    tree.reserve(branch, len(tokens))
    tree.advance(branch, len(tokens))
    return branch


def test_what_an_adapter_computed_is_forgotten_and_its_pages_come_back():
    tree = Tree(8, SIZE)
    branch = tree.open([1] * 2 * SIZE, adapter=1)
    tree.reserve(branch, branch.length)
    tree.advance(branch, branch.length)
    assert not tree.index.drop_adapter(1)  # a branch needs it
    tree.close(branch)
    assert tree.open([1] * 2 * SIZE).num_reused == 0
    assert tree.open([1] * 2 * SIZE, adapter=2).num_reused == 0
    assert tree.index.drop_adapter(1)
    assert tree.open([1] * 2 * SIZE, adapter=1).num_reused == 0
    tree.index.clear()
    assert tree.pool.used == 0


def test_the_longest_prefix_is_found_to_the_token():
    tree = Tree(32, SIZE)
    tree.close(computed(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
    tree.close(computed(tree, [1, 2, 3, 4, 5, 6, 0, 0]))
    assert tree.open([1, 2, 3, 4, 5, 6, 7, 9, 9]).num_reused == 7
    assert tree.open([1, 2, 3, 4, 5, 6, 0, 7, 7]).num_reused == 7
    assert tree.open([1, 2, 9]).num_reused == 2
    assert tree.open([7, 1]).num_reused == 0
    long_branch = tree.open([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert long_branch.num_reused == 9, "the last token is always computed"
    assert tree.open([1, 2, 3, 4, 0, 0, 0, 0]).num_reused == 4


def test_running_texts_share_whole_pages_before_they_end():
    tree = Tree(32, SIZE)
    computed(tree, [1, 2, 3, 4, 5, 6])
    assert tree.open([1, 2, 3, 4, 5, 6, 7]).num_reused == 4


def test_texts_that_turn_out_the_same_share_their_pages():
    tree = Tree(32, SIZE)
    first, other = tree.open([1, 2, 3, 4, 5]), tree.open([1, 2, 3, 4, 5])
    for branch in (first, other):
        tree.reserve(branch, 5)
        tree.advance(branch, 5)
    assert first.node is other.node and tree.pool.used == 3


def test_the_least_recently_used_goes_first():
    tree = Tree(4, SIZE)
    for start in (10, 20, 30, 40):
        tree.close(computed(tree, [start, 1, 2, 3]))
    tree.close(tree.open([10, 1, 2, 3, 4]))  # used again
    tree.close(computed(tree, [50, 1, 2, 3]))  # needs room
    assert tree.open([10, 1, 2, 3, 4]).num_reused == 4
    assert tree.open([20, 1, 2, 3, 4]).num_reused == 0


def test_a_full_pool_says_so():
    pool = PagePool(1)
    pool.allocate()
    with pytest.raises(OutOfPagesError):
        pool.allocate()
    with pytest.raises(UnspoolError, match="at least 1 page"):
        PagePool(0)


def test_what_is_provisional_is_found_by_nobody_until_it_is_committed():
    tree = Tree(32, SIZE)
    branch = computed(tree, [1, 2, 3, 4])
    tree.append(branch, [9] * 8, provisional=True)
    tree.reserve(branch, 12)
    tree.advance(branch, 12)
    assert tree.open([1, 2, 3, 4, 9, 9, 9, 9, 9]).num_reused == 4
    tree.replace(branch, 5, [7, 7])
    assert branch.num_computed == 4, (
        "all of a block may see each other: all of it is computed again"
    )
    tree.advance(branch, 12)
    tree.commit(branch)
    assert tree.open([1, 2, 3, 4, 9, 7, 7, 9, 9, 9, 9, 9, 5]).num_reused == 12


def lines_run(work: Any, *arguments: Any) -> tuple[int, Any]:
    """How many lines of Python a call runs, and what it gives."""
    lines = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    gc.disable()  # what others left behind would be counted too
    tracer = sys.gettrace()  # that of a coverage run, for example
    sys.settrace(count)
    try:
        result = work(*arguments)
    finally:
        sys.settrace(tracer)
        gc.enable()
    return lines, result


def test_fork_and_rewind_cost_the_same_however_long_the_text():
    """Counted in lines of code and pages, not in seconds: nothing is copied or computed."""
    costs = []
    for length in (102, 100_002):
        tree = Tree(30_000, SIZE)
        trunk = computed(tree, list(range(length)))
        used = tree.pool.used
        forking, fork = lines_run(tree.fork, trunk)
        assert tree.pool.used == used and not tree.copies
        rewinding, _ = lines_run(tree.rewind, fork, length - 7)
        costs.append((forking, rewinding))
        tree.append(fork, [1])
        tree.reserve(fork, fork.length)
        assert len(tree.copies) == 1, "one partly filled page is copied when one side writes"
    assert costs[0] == costs[1]


def test_a_chain_of_copies_reads_its_first_page():
    """A side row of a text whose unfinished page is itself copied in the same step."""
    tree = Tree(32, SIZE)
    trunk = computed(tree, [1, 2, 3, 4, 5, 6])
    fork = tree.fork(trunk)
    assert fork.shared_tail is not None
    lender = fork.shared_tail.page
    tree.append(fork, [7])
    tree.reserve(fork, fork.length)
    side = tree.draft_fork(fork, [8], 1)
    assert side is not None
    copies = tree.take_copies()
    assert sorted(copies) == sorted([(lender, fork.pages[0]), (lender, side.pages[0])])
    assert not tree.take_copies()


def test_no_copy_goes_to_a_page_that_another_one_reads():
    """Not even where that page was evicted since and is the only one that is free."""
    tree = Tree(5, SIZE)
    tree.close(computed(tree, [1, 1, 1]))
    tree.close(computed(tree, [2, 2, 2]))
    ones = [tree.open([1, 1, token]) for token in (3, 4)]
    twos = [tree.open([2, 2, token]) for token in (3, 4)]
    assert all(branch.num_computed == 2 for branch in (*ones, *twos))
    tree.reserve(ones[0], 3)
    tree.close(ones[1])  # now nothing but the pending copy needs the page of the ones
    held_pages = [tree.pool.allocate() for _ in range(tree.pool.free)]
    tree.reserve(twos[0], 3)
    copies = tree.take_copies()
    sources, targets = zip(*copies, strict=True)
    assert not set(sources) & set(targets)
    assert twos[0].num_computed == 0, "without a page for the copy its tokens are computed again"
    for branch in (ones[0], *twos):
        tree.close(branch)
    tree.pool.release(held_pages)
    tree.index.clear()
    assert tree.pool.used == 0
