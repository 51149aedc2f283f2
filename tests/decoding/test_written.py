"""Branches are released in the end, whatever happens to them."""

from __future__ import annotations

import pytest

from decoding.support import PROMPT, pages_left
from unspool.decoding.written import Branches
from unspool.engine.scheduler import Task


def test_move_forks_and_prunes(tiny_lm):
    engine = tiny_lm.engine
    with Branches(engine) as held:
        root = held.open(PROMPT)
        first = engine.extend(root)
        one, two, three = held.move([root, root, root])
        assert one is root and len({one, two, three}) == 3
        assert two.pages == one.pages  # shared until one side writes
        engine.extend_all([(one, [1]), (two, [2]), (three, [3])])
        two, four = held.move([two, two])
        assert one.closed and three.closed and not two.closed and not four.closed
        assert four.tokens == [*PROMPT, 2]
        engine.rewind(four, len(PROMPT))
        assert engine.extend(four) == pytest.approx(first, abs=1e-4)
    assert two.closed and four.closed
    assert pages_left(tiny_lm) == 0


class Waited(Task):
    """Somebody waits for it, and does not mind."""

    def complete(self): ...

    def fail(self, error): ...


def test_a_branch_that_is_still_being_computed(tiny_lm):
    """As after an interrupt, or an error in another branch of the same batch."""
    engine = tiny_lm.engine
    held = Branches(engine)
    branch = held.open(PROMPT)

    def begin_and_leave() -> None:
        engine.scheduler.add(Waited(branch))
        held.__exit__(None, None, None)

    engine.call(begin_and_leave)
    tiny_lm.generate(PROMPT, max_tokens=2)  # some batches go by
    assert pages_left(tiny_lm) == 0
