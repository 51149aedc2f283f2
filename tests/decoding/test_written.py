"""HeldBranches are always released."""

from __future__ import annotations

import pytest

from helpers.decoding_support import PROMPT, pages_left
from unspool.decoding.branches import HeldBranches
from unspool.engine.scheduler import EngineTask


def test_move_forks_and_prunes(tiny_lm):
    engine = tiny_lm.engine
    with HeldBranches(engine) as open_branches:
        root = open_branches.open(PROMPT)
        first = engine.extend(root)
        item, two, three = open_branches.move([root, root, root])
        assert item is root and len({item, two, three}) == 3
        assert two.pages == item.pages  # shared until one side writes
        engine.extend_all([(item, [1]), (two, [2]), (three, [3])])
        two, four = open_branches.move([two, two])
        assert item.closed and three.closed and not two.closed and not four.closed
        assert four.tokens == [*PROMPT, 2]
        engine.rewind(four, len(PROMPT))
        assert engine.extend(four) == pytest.approx(first, abs=1e-4)
    assert two.closed and four.closed
    assert pages_left(tiny_lm) == 0


class Waited(EngineTask):
    """A waiter that ignores errors."""

    def complete(self): ...

    def fail(self, error): ...


def test_a_branch_that_is_still_being_computed(tiny_lm):
    """As after an interrupt, or an error in another branch of the same batch."""
    engine = tiny_lm.engine
    open_branches = HeldBranches(engine)
    branch = open_branches.open(PROMPT)

    def begin_and_leave() -> None:
        engine.scheduler.add(Waited(branch))
        open_branches.__exit__(None, None, None)

    engine.call(begin_and_leave)
    tiny_lm.generate(PROMPT, max_tokens=2)  # some batches go by
    assert pages_left(tiny_lm) == 0
