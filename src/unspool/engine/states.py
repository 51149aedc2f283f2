"""The slots for recurrent states: who holds which, and what goes when room is needed.

A model with recurrent layers knows all it has read of a text as one state, which every token
changes. A branch stands where its state is (its tip). A step reads a branch's state from one slot
and writes the next one into the same, or, where the old one is to be kept, into another. States on
the way are held by the nodes of the prefix index, at any place within their pages, so whoever comes
along finds them; those in a branch's unfinished page are held by the branch until its page is full.

When no slot is free, the states that are worth least are forgotten: those that few tokens bring
back, and that nobody used for long. That includes where branches stand that do not run: they fall
back to an earlier state and are computed again, should they be needed. Running texts keep theirs;
if that is too many, the scheduler preempts one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from unspool.backends.step import Ints
from unspool.engine.pages import OutOfPagesError
from unspool.engine.standing import (
    Page,
    Standing,
    State,
    Text,
    is_alone,
    standing_of,
    state_before,
)
from unspool.engine.state_policy import (
    GUESS,
    MARK,
    PAGE,
    furthest_thinned,
    is_kept,
    on_the_way,
)
from unspool.errors import UnspoolError

_FEW_PAGES = 4  # a state not larger than so many is cheap: it is kept at every border and guess
_SEEN_BACK = 256  # pages that are gone up in search of an earlier state, when states are compared
_WORTH = {GUESS: 1.0, PAGE: 1.0, MARK: 4.0}


class OutOfStatesError(OutOfPagesError):
    """No slot is free and no state can be forgotten; the scheduler must preempt somebody."""


class StatePool:
    """A fixed number of slots, and all states in them."""

    def __init__(self, count: int, page_size: int, *, cheap: bool = False) -> None:
        if count < 2:
            raise UnspoolError(
                f"{count} recurrent states are too few to run a text; allow more memory"
            )
        self.count, self.cheap, self._size = count, cheap, page_size
        self.texts = 0  # that run
        self.clock = 0  # tokens computed so far
        self.forgotten = 0  # states that had to make room
        self.lost: Callable[[Any], None] = lambda branch: None  # told that its tip is gone
        self._free = list(range(count - 1, -1, -1))
        self._states: set[State] = set()
        self._pinned: list[State] = []

    @staticmethod
    def of(count: int, state_bytes: int, page_bytes: int, page_size: int) -> StatePool | None:
        """The pool for a backend; None if its model has no states."""
        if not state_bytes:
            return None
        return StatePool(count, page_size, cheap=state_bytes <= _FEW_PAGES * page_bytes)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    @property
    def spare(self) -> int:
        """Slots that running texts do not need, even if each writes another than it reads."""
        return max(0, self.count - 2 * self.texts)

    # -- the next step ---------------------------------------------------------------------------

    def plan(
        self,
        branch: Text,
        until: int,
        marks: Collection[int] = (),
        guessed: int = 0,
        *,
        split: bool = False,
    ) -> None:
        """Slots for a row that computes a branch up to `until`, the last tokens of it guesses.

        It reads where the branch stands. If others need that too, or guesses may turn out wrong, or
        it is worth keeping, the row writes into another slot. Without room nothing is changed.
        """
        standing = standing_of(branch)
        self._drop_guesses(standing)
        source, places = standing.tip, {*marks, standing.junction}
        if branch.provisional is not None:
            places.add(branch.provisional)
        first = 0 if source is None else source.length
        why = self._reason(first, branch.length, places)
        if source is None or why or guessed or split or not is_alone(source):
            target = self._allocate(until)
            self._move_on(standing, target, why, kept=bool(why or guessed or split))
        else:
            target = source
        self.clock += until - first
        target.length, target.used, standing.source = until, self.clock, source
        standing.captures = []
        if until - first > 1:
            wanted = list(on_the_way(first, until, branch.length, self._size, self.cheap, places))
            if guessed and self.cheap:
                known = {place for place, _ in wanted}
                guesses = set(range(until - guessed, until)) - known
                wanted += [(place, GUESS) for place in sorted(guesses)]
            standing.captures = self._capture(standing, wanted)

    def rows(
        self, branches: Sequence[Text], firsts: Sequence[int], starts: Sequence[int]
    ) -> tuple[Ints, Ints]:
        """`StepBatch.states` and `StepBatch.captures` of rows that were planned."""
        pairs: list[tuple[int, int]] = []
        captures: list[tuple[int, int]] = []
        for branch, first, start in zip(branches, firsts, starts, strict=False):
            standing = standing_of(branch)
            source, tip = standing.source, standing.tip
            assert tip is not None
            pairs.append((-1 if source is None else source.slot, tip.slot))
            for state in standing.captures:
                captures.append((start + state.length - 1 - first, state.slot))
        pinned, self._pinned = self._pinned, []
        for state in pinned:  # the next step comes after this one
            state.pins -= 1
            self._free_if_unused(state)
        return np.array(pairs), np.array(sorted(captures)).reshape(-1, 2)

    def run(self, branch: Text, running: bool) -> None:
        """Whether a branch runs: then its state cannot be taken from it."""
        standing = standing_of(branch)
        self.texts += running - standing.running
        standing.running = running

    # -- where branches stand --------------------------------------------------------------------

    def nearest(self, branch: Text, length: int) -> State | None:
        """The last state on a branch's way that has read at most so many tokens."""
        standing = standing_of(branch)
        best = standing.tip
        if best is not None and best.length > length:
            best = None
        own = list(standing.kept.values())
        if branch.borrowed is not None:
            own += branch.borrowed.states.values()
        for state in own:
            if state.length <= length and (best is None or state.length > best.length):
                best = state
        if best is not None and best.length > branch.start:
            return best
        found = state_before(branch.node, length + 1)
        return found if best is None or (found and found.length > best.length) else best

    def stand(self, branch: Text, state: State | None) -> None:
        """Let a branch stand at a state; what it held behind that is not needed any more."""
        standing, length = standing_of(branch), 0 if state is None else state.length
        if state is not None:
            state.tips.append(standing)
            state.used = self.clock
        old, standing.tip = standing.tip, state
        if old is not None:
            old.tips.remove(standing)
            self._free_if_unused(old)
        for place in [place for place in standing.kept if place > length]:
            self._give_up(standing, place)

    def stand_beside(self, branch: Text, other: Text) -> None:
        """Let a branch begin where the step that is being made begins with another."""
        self.stand(branch, standing_of(other).source)
        self.run(branch, True)

    def hold(self, branch: Text, why: int = MARK) -> None:
        """Keep where a branch stands for others: texts part here, or one ends."""
        tip = standing_of(branch).tip
        place = branch.node if branch.computed == branch.start else branch.borrowed
        if tip is not None and tip.length == branch.computed and place is not None:
            self._place(place, tip, why)

    # -- pages come into the index and leave it ----------------------------------------------------

    def hand_over(self, branch: Text, node: Page, end: int) -> None:
        """A page of the branch, filled up to `end`, is in the index now, and so are its states."""
        standing, begin = standing_of(branch), (node.depth - 1) * self._size
        for place, state in list(standing.kept.items()):
            if begin < place <= end and state.why:
                self._place(node, state, state.why)
                self._give_up(standing, place)

    def take_over(self, branch: Text, node: Page) -> None:
        """A page of the index becomes the branch's own again, and so do its states."""
        standing = standing_of(branch)
        for place, state in list(node.states.items()):
            if place not in standing.kept:
                standing.kept[place] = state
                state.keepers.append(standing)
            self._take_down(state)

    def leave_page(self, node: Page) -> None:
        """The page is evicted."""
        for state in list(node.states.values()):
            self._take_down(state)

    def thin(self, branch: Text, added: int) -> None:
        """The branch has so many more pages in the index: of those before, fewer states are kept.
        Those that lie on the way of others stay."""
        if self.cheap:
            return
        node, tip = branch.node, branch.node.depth
        reach = furthest_thinned(tip) if added == 1 else tip
        while node.parent is not None and tip - node.depth <= reach and node.live == 1:
            state = node.states.get(node.depth * self._size)
            if state is not None and state.why == PAGE and not is_kept(node.depth, tip):
                self._take_down(state)
            node = node.parent

    # -- room ------------------------------------------------------------------------------------

    def evict(self, wanted: int) -> None:
        """Forget the states worth least until so many slots are free, if that can be."""
        going = True
        while going and len(self._free) < wanted:
            going = False
            candidates = [state for state in self._states if not (state.pins or state.running)]
            earlier = {state: self._earlier(state) for state in candidates}
            candidates.sort(key=lambda state: (self._worth(state, earlier[state]), state.slot))
            neighbours: set[State] = set()  # of those forgotten: worth more than was said
            for state in candidates:
                if len(self._free) >= wanted:
                    return
                before = earlier[state]
                if state in self._states and state not in neighbours and before not in neighbours:
                    neighbours |= {state} if before is None else {state, before}
                    self._forget(state)
                    going = True

    def _allocate(self, length: int) -> State:
        if not self._free:
            self.evict(max(1, self.count // 16))
            if not self._free:
                raise OutOfStatesError
        state = State(self._free.pop(), length)
        state.used = self.clock
        self._states.add(state)
        return state

    def _capture(self, standing: Standing, wanted: list[tuple[int, int]]) -> list[State]:
        """States on the way, as many as there is room for beside what running texts need next."""
        needed = self.texts + len(wanted)
        if len(self._free) < needed:
            self.evict(min(self.count, needed + self.count // 16))
        found: list[State] = []
        for place, why in wanted:
            if len(self._free) <= self.texts:
                break
            state = self._allocate(place)
            state.why = why
            standing.kept[place] = state
            state.keepers.append(standing)
            self._pin(state)
            found.append(state)
        return found

    def _worth(self, state: State, earlier: State | None) -> float:
        """Tokens that would have to be computed again without it, against how long it was not
        used."""
        gap = state.length - (0 if earlier is None else earlier.length)
        kind = _WORTH[MARK if state.tips else state.why]
        return kind * gap / (1 + self.clock - state.used)

    def _earlier(self, state: State) -> State | None:
        """The state before this one on its way."""
        if state.node is not None:
            return state_before(state.node, state.length, _SEEN_BACK)
        holders = state.keepers or state.tips
        if not holders:
            return None
        branch, best = holders[0].branch, None
        own = list(holders[0].kept.values())
        if branch.borrowed is not None:
            own += branch.borrowed.states.values()
        for other in own:
            if other.length < state.length and (best is None or other.length > best.length):
                best = other
        return best or state_before(branch.node, state.length, _SEEN_BACK)

    def _forget(self, state: State) -> None:
        self.forgotten += 1
        if state.node is not None:
            self._take_down(state)
        for keeper in state.keepers.copy():
            self._give_up(keeper, state.length)
        for tip in state.tips.copy():
            tip.tip = None
            state.tips.remove(tip)
            self._free_if_unused(state)
            self.lost(tip.branch)

    # -- who holds what --------------------------------------------------------------------------

    def _reason(self, place: int, length: int, marks: Collection[int]) -> int:
        """Why the state at a place is kept; 0: it is not."""
        if place in marks:
            return MARK
        border, inside = divmod(place, self._size)
        if inside or not border:
            return GUESS
        return PAGE if self.cheap or is_kept(border, length // self._size) else GUESS

    def _move_on(self, standing: Standing, target: State, why: int, *, kept: bool) -> None:
        """Let a branch stand at the state that the step will write, beside the one it reads."""
        source, standing.tip = standing.tip, target
        target.tips.append(standing)
        if source is not None:
            if kept:
                self._keep(standing, source, why)
            source.tips.remove(standing)
            self._pin(source)

    def _keep(self, standing: Standing, state: State, why: int) -> None:
        """Hold the state that a branch moves on from."""
        branch = standing.branch
        if why and state.length == branch.start and branch.node.depth:
            self._place(branch.node, state, why)
        else:
            state.why = max(state.why, why)
        if state.node is None and state.length not in standing.kept:
            standing.kept[state.length] = state
            state.keepers.append(standing)

    def _place(self, node: Page, state: State, why: int) -> None:
        """Put a state into a node, unless that has one for the same place."""
        known = node.states.get(state.length)
        if known is None and state.node is None:
            node.states[state.length], state.node = state, node
            known = state
        if known is not None:
            known.why = max(known.why, why)

    def _take_down(self, state: State) -> None:
        assert state.node is not None
        del state.node.states[state.length]
        state.node = None
        self._free_if_unused(state)

    def _give_up(self, standing: Standing, place: int) -> None:
        state = standing.kept.pop(place)
        state.keepers.remove(standing)
        self._free_if_unused(state)

    def _drop_guesses(self, standing: Standing) -> None:
        """What was kept for guesses that are checked by now."""
        if standing.kept:
            for place in [p for p, state in standing.kept.items() if not state.why]:
                self._give_up(standing, place)

    def _pin(self, state: State) -> None:
        state.pins += 1
        self._pinned.append(state)

    def _free_if_unused(self, state: State) -> None:
        needed = state.node or state.tips or state.keepers or state.pins
        if not needed and state in self._states:
            self._states.remove(state)
            self._free.append(state.slot)
