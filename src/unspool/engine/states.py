"""Slots for recurrent states: which state is in which slot, and what is evicted.

A model with recurrent layers keeps all it has read of a text as one state, which every token
changes. A branch has a current state (its cursor's tip). A step reads a branch's state from one
slot and writes the next one into the same slot, or into another one where the old state is to be
kept. Earlier states are held by the nodes of the prefix cache, at any position within their pages,
so that other branches find them; those in a branch's unfinished page are held by the branch until
the page is full.

When no slot is free, the states that are worth least are evicted: those that few tokens restore,
and that were not used for long. That includes the states of idle branches, which fall back to an
earlier state and are computed again when needed. Running branches keep theirs; if these are too
many, the scheduler preempts one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from unspool.backends.step import Ints
from unspool.errors import UnspoolError

# -- Which recurrent states of a text are worth keeping

DENSE = 8  # every border of this many last pages is kept
MESSAGES = 8  # the ends of this many last messages of a prompt are marked, and of the first one

# Why a state is kept; a larger reason is worth more.
DRAFT, PAGE, MARK = 0, 1, 2


def is_kept(border: int, num_pages: int) -> bool:
    """Return whether the state after `border` pages is kept in a text of `num_pages` pages."""
    power_of_two = border & -border  # the largest that divides it
    return num_pages - border < DENSE * power_of_two


def furthest_thinned(num_pages: int) -> int:
    """Return how many pages before the end the furthest state lies that is no longer kept.

    For a text that has just grown to `num_pages` pages; 0: all states are kept.
    """
    furthest, power_of_two = 0, 1
    while DENSE * power_of_two < num_pages:
        border = num_pages - DENSE * power_of_two
        if border & -border == power_of_two:
            furthest = DENSE * power_of_two
        power_of_two *= 2
    return furthest


def find_captures(
    first: int, until: int, length: int, page_size: int, every: bool, marks: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Yield the positions inside a step whose states are kept, and why; the most valuable first.

    Args:
        first: The step computes from here ...
        until: ... up to here.
        length: Of the whole text.
        page_size: Tokens of a page.
        every: Keep the states at all page borders: they are cheap.
        marks: Positions where texts part.
    """
    marked = sorted((position for position in marks if first < position < until), reverse=True)
    for position in marked:
        yield position, MARK
    num_pages = length // page_size
    for border in range((until - 1) // page_size, first // page_size, -1):
        position = border * page_size
        if position not in marked and (every or is_kept(border, num_pages)):
            yield position, PAGE


def message_ends(prompt: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Return the positions after the messages of a prompt: of the first, and of the last ones."""
    ends = [index + 1 for index, token in enumerate(prompt) if token in end_ids]
    return ends if len(ends) <= MESSAGES else [ends[0], *ends[-MESSAGES:]]


# -- Recurrent states in the tree: where each one is, and which branches need it


class State:
    """A recurrent state after some number of tokens, and who needs it."""

    __slots__ = ("cursors", "keepers", "last_used", "length", "node", "num_pins", "reason", "slot")

    def __init__(self, slot: int, length: int) -> None:
        self.slot = slot
        self.length = length  # tokens read
        self.reason = DRAFT
        self.node: StateNode | None = None  # the prefix-cache page that holds it, if any
        self.cursors: list[StateCursor] = []  # of branches whose current state this is
        self.keepers: list[StateCursor] = []  # of branches that keep it for their unfinished page
        self.num_pins = 0  # uses by the step that is being built
        self.last_used = 0  # by the pool's clock

    @property
    def is_needed_now(self) -> bool:
        """Whether a running branch is at this state, or may have to return to it in this step."""
        if any(cursor.running for cursor in self.cursors):
            return True
        return self.reason == DRAFT and any(keeper.running for keeper in self.keepers)

    def has_single_owner(self) -> bool:
        """Return whether only one branch needs the state, so that it may be overwritten."""
        is_kept = self.node is not None or self.keepers or self.num_pins
        return not is_kept and len(self.cursors) == 1


class StateCursor:
    """A branch's current state, and earlier ones that no prefix-cache node holds."""

    __slots__ = ("branch", "captures", "junction", "kept_states", "running", "source", "tip")

    def __init__(self, branch: StateBranch) -> None:
        self.branch = branch
        # The current state; None: nothing is read. While a step is in flight: its result.
        self.tip: State | None = None
        self.kept_states: dict[int, State] = {}  # by length
        self.junction = -1  # a position where texts part, to be marked when it is passed
        self.running = False
        self.source: State | None = None  # what the last planned step reads ...
        self.captures: list[State] = []  # ... and the intermediate states it writes


class StateNode(Protocol):
    """A node of the prefix cache, as the state pool sees it."""

    states: dict[int, State]
    depth: int
    live: int

    @property
    def parent(self) -> StateNode | None: ...


class StateBranch(Protocol):
    """A branch, as the state pool sees it."""

    start: int
    num_computed: int
    length: int
    provisional: int | None

    @property
    def node(self) -> StateNode: ...

    @property
    def shared_tail(self) -> StateNode | None: ...

    @property
    def state(self) -> StateCursor | None: ...


def cursor_of(branch: StateBranch) -> StateCursor:
    assert branch.state is not None, "the model has no recurrent states"
    return branch.state


def last_state_before(node: StateNode, length: int, max_pages: int | None = None) -> State | None:
    """Return the last state shorter than `length` that a node or its ancestors hold.

    At most `max_pages` nodes are searched; None: up to the root.
    """
    current: StateNode | None = node
    while current is not None and max_pages != 0:
        earlier = [state for state in current.states.values() if state.length < length]
        if earlier:
            return max(earlier, key=lambda state: state.length)
        current = current.parent
        max_pages = None if max_pages is None else max_pages - 1
    return None


_CHEAP_PAGES = (
    4  # a state of at most this many pages' bytes is kept at every border and draft token
)
_MAX_SEARCHED_PAGES = 256  # ancestors searched for an earlier state when states are compared
_WORTH = {DRAFT: 1.0, PAGE: 1.0, MARK: 4.0}


class OutOfStatesError(Exception):
    """No slot is free and no state can be evicted; the scheduler must preempt a task."""


class StatePool:
    """A fixed number of slots, and all states in them."""

    def __init__(self, count: int, page_size: int, *, cheap: bool = False) -> None:
        if count < 2:
            raise UnspoolError(
                f"at least 2 slots for recurrent states are needed, got {count}; allow more memory"
            )
        self.count, self.cheap, self._size = count, cheap, page_size
        self.num_running = 0  # branches
        self.clock = 0  # tokens computed so far
        self.num_evicted = 0  # states evicted so far
        # Called with a branch whose current state was evicted.
        self.on_state_lost: Callable[[Any], None] = lambda branch: None
        self._free = list(range(count - 1, -1, -1))
        self._states: set[State] = set()
        self._pinned: list[State] = []

    @staticmethod
    def for_backend(
        count: int, state_bytes: int, page_bytes: int, page_size: int
    ) -> StatePool | None:
        """Return the pool for a backend; None if its model has no recurrent states."""
        if not state_bytes:
            return None
        return StatePool(count, page_size, cheap=state_bytes <= _CHEAP_PAGES * page_bytes)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    @property
    def spare(self) -> int:
        """Slots that running branches do not need, even if each writes to a second one."""
        return max(0, self.count - 2 * self.num_running)

    # -- the next step ---------------------------------------------------------------------------

    def plan(
        self,
        branch: StateBranch,
        until: int,
        marks: Collection[int] = (),
        num_draft: int = 0,
        *,
        has_forks: bool = False,
    ) -> None:
        """Choose slots for a row that computes a branch up to `until`.

        The row reads the branch's current state. It writes to another slot if others need that
        state too, if draft tokens may be rejected, or if the state is worth keeping.

        Args:
            branch: The row's branch.
            until: The step computes up to this position.
            marks: Positions whose states are worth keeping.
            num_draft: How many of the last tokens are draft tokens.
            has_forks: Draft branches will start from the same state.

        Raises:
            OutOfStatesError: No slot is free. Nothing is changed then.
        """
        cursor = cursor_of(branch)
        self._drop_draft_states(cursor)
        source, positions = cursor.tip, {*marks, cursor.junction}
        if branch.provisional is not None:
            positions.add(branch.provisional)
        first = 0 if source is None else source.length
        reason = self._reason(first, branch.length, positions)
        keeps_source = bool(reason or num_draft or has_forks)
        if source is None or keeps_source or not source.has_single_owner():
            target = self._allocate(until)
            self._move_tip(cursor, target, reason, keeps_source=keeps_source)
        else:
            target = source
        self.clock += until - first
        target.length, target.last_used, cursor.source = until, self.clock, source
        cursor.captures = []
        if until - first > 1:
            captures = list(
                find_captures(first, until, branch.length, self._size, self.cheap, positions)
            )
            if num_draft and self.cheap:
                captured = {position for position, _ in captures}
                drafted = set(range(until - num_draft, until)) - captured
                captures += [(position, DRAFT) for position in sorted(drafted)]
            cursor.captures = self._capture(cursor, captures)

    def rows(
        self, branches: Sequence[StateBranch], firsts: Sequence[int], starts: Sequence[int]
    ) -> tuple[Ints, Ints]:
        """Return `StepBatch.states` and `StepBatch.captures` of rows that were planned."""
        pairs: list[tuple[int, int]] = []
        captures: list[tuple[int, int]] = []
        for branch, first, start in zip(branches, firsts, starts, strict=False):
            cursor = cursor_of(branch)
            source, tip = cursor.source, cursor.tip
            assert tip is not None
            pairs.append((-1 if source is None else source.slot, tip.slot))
            for state in cursor.captures:
                captures.append((start + state.length - 1 - first, state.slot))
        pinned, self._pinned = self._pinned, []
        for state in pinned:  # later steps run after this one
            state.num_pins -= 1
            self._free_if_unused(state)
        return np.array(pairs), np.array(sorted(captures), np.int64).reshape(-1, 2)

    def set_running(self, branch: StateBranch, running: bool) -> None:
        """Set whether a branch runs: the current state of a running branch is not evicted."""
        cursor = cursor_of(branch)
        self.num_running += running - cursor.running
        cursor.running = running

    # -- cursors ---------------------------------------------------------------------------------

    def nearest(self, branch: StateBranch, length: int) -> State | None:
        """Return the last kept state of a branch that has read at most `length` tokens."""
        cursor = cursor_of(branch)
        best = cursor.tip
        if best is not None and best.length > length:
            best = None
        for state in self._states_of_tail(cursor):
            if state.length <= length and (best is None or state.length > best.length):
                best = state
        if best is not None and best.length > branch.start:
            return best
        cached = last_state_before(branch.node, length + 1)
        return cached if best is None or (cached and cached.length > best.length) else best

    def seek(self, branch: StateBranch, state: State | None) -> None:
        """Make a state the branch's current one, and drop the branch's states after it."""
        cursor, length = cursor_of(branch), 0 if state is None else state.length
        if state is not None:
            state.cursors.append(cursor)
            state.last_used = self.clock
        previous, cursor.tip = cursor.tip, state
        if previous is not None:
            previous.cursors.remove(cursor)
            self._free_if_unused(previous)
        for position in [position for position in cursor.kept_states if position > length]:
            self._drop_kept(cursor, position)

    def fork_cursor(self, branch: StateBranch, other: StateBranch) -> None:
        """Start a branch at the state that the step being built reads for another branch."""
        self.seek(branch, cursor_of(other).source)
        self.set_running(branch, True)

    def publish_tip(self, branch: StateBranch, reason: int = MARK) -> None:
        """Put a branch's current state into the prefix cache: texts part here, or one ends."""
        tip = cursor_of(branch).tip
        node = branch.node if branch.num_computed == branch.start else branch.shared_tail
        if tip is not None and tip.length == branch.num_computed and node is not None:
            self._attach(node, tip, reason)

    def restore(self, node: StateNode, length: int, reason: int) -> int | None:
        """Return the slot for a saved state that a page of the prefix cache gets; None: it has one
        already, or no slot is free."""
        if length in node.states or not self._free:
            return None
        state = self._allocate(length)
        self._attach(node, state, reason)
        return state.slot

    # -- pages that enter and leave the prefix cache -----------------------------------------------

    def hand_over(self, branch: StateBranch, node: StateNode, end: int) -> None:
        """Move the states of a page, filled up to `end`, from its branch to its cache node."""
        cursor, begin = cursor_of(branch), (node.depth - 1) * self._size
        for position, state in list(cursor.kept_states.items()):
            if begin < position <= end and state.reason:
                self._attach(node, state, state.reason)
                self._drop_kept(cursor, position)

    def take_over(self, branch: StateBranch, node: StateNode) -> None:
        """Move the states of a page from its cache node to the branch that owns it again."""
        cursor = cursor_of(branch)
        for position, state in list(node.states.items()):
            if position not in cursor.kept_states:
                cursor.kept_states[position] = state
                state.keepers.append(cursor)
            self._detach(state)

    def drop_page(self, node: StateNode) -> None:
        """Drop the states of a page that is evicted."""
        for state in list(node.states.values()):
            self._detach(state)

    def thin(self, branch: StateBranch, num_added: int) -> None:
        """Keep fewer states of earlier pages, now that the branch has more pages in the cache.

        States that other branches pass stay.
        """
        if self.cheap:
            return
        node, num_pages = branch.node, branch.node.depth
        reach = furthest_thinned(num_pages) if num_added == 1 else num_pages
        while node.parent is not None and num_pages - node.depth <= reach and node.live == 1:
            state = node.states.get(node.depth * self._size)
            if state is not None and state.reason == PAGE and not is_kept(node.depth, num_pages):
                self._detach(state)
            node = node.parent

    # -- eviction ----------------------------------------------------------------------------------

    def evict(self, num_slots: int) -> None:
        """Evict the states worth least until `num_slots` are free, or nothing can be evicted."""
        is_progressing = True
        while is_progressing and len(self._free) < num_slots:
            is_progressing = False
            candidates = [s for s in self._states if not (s.num_pins or s.is_needed_now)]
            earlier = {state: self._earlier(state) for state in candidates}
            candidates.sort(key=lambda state: (self._worth(state, earlier[state]), state.slot))
            # The neighbours of an evicted state become worth more: the next pass decides.
            neighbours: set[State] = set()
            for state in candidates:
                if len(self._free) >= num_slots:
                    return
                before = earlier[state]
                if state in self._states and state not in neighbours and before not in neighbours:
                    neighbours |= {state} if before is None else {state, before}
                    self._evict_state(state)
                    is_progressing = True

    def _allocate(self, length: int) -> State:
        if not self._free:
            self.evict(max(1, self.count // 16))
            if not self._free:
                raise OutOfStatesError
        state = State(self._free.pop(), length)
        state.last_used = self.clock
        self._states.add(state)
        return state

    def _capture(self, cursor: StateCursor, captures: list[tuple[int, int]]) -> list[State]:
        """Allocate slots for intermediate states, as far as running branches leave them free."""
        needed = self.num_running + len(captures)
        if len(self._free) < needed:
            self.evict(min(self.count, needed + self.count // 16))
        states: list[State] = []
        for position, reason in captures:
            if len(self._free) <= self.num_running:
                break
            state = self._allocate(position)
            state.reason = reason
            cursor.kept_states[position] = state
            state.keepers.append(cursor)
            self._pin(state)
            states.append(state)
        return states

    def _worth(self, state: State, earlier: State | None) -> float:
        """Return the tokens to compute again without the state, by the time since its last use."""
        gap = state.length - (0 if earlier is None else earlier.length)
        weight = _WORTH[MARK if state.cursors else state.reason]
        return weight * gap / (1 + self.clock - state.last_used)

    def _earlier(self, state: State) -> State | None:
        """Return the state before this one in the same text."""
        if state.node is not None:
            return last_state_before(state.node, state.length, _MAX_SEARCHED_PAGES)
        holders = state.keepers or state.cursors
        if not holders:
            return None
        best: State | None = None
        for other in self._states_of_tail(holders[0]):
            if other.length < state.length and (best is None or other.length > best.length):
                best = other
        return best or last_state_before(holders[0].branch.node, state.length, _MAX_SEARCHED_PAGES)

    def _states_of_tail(self, cursor: StateCursor) -> list[State]:
        """Return the states in a branch's unfinished page."""
        states = list(cursor.kept_states.values())
        if cursor.branch.shared_tail is not None:
            states += cursor.branch.shared_tail.states.values()
        return states

    def _evict_state(self, state: State) -> None:
        self.num_evicted += 1
        if state.node is not None:
            self._detach(state)
        for keeper in state.keepers.copy():
            self._drop_kept(keeper, state.length)
        for cursor in state.cursors.copy():
            cursor.tip = None
            state.cursors.remove(cursor)
            self._free_if_unused(state)
            self.on_state_lost(cursor.branch)

    # -- who holds what --------------------------------------------------------------------------

    def _reason(self, position: int, length: int, marks: Collection[int]) -> int:
        """Return why the state at a position is kept; DRAFT (0): it is not."""
        if position in marks:
            return MARK
        border, offset = divmod(position, self._size)
        if offset or not border:
            return DRAFT
        return PAGE if self.cheap or is_kept(border, length // self._size) else DRAFT

    def _move_tip(
        self, cursor: StateCursor, target: State, reason: int, *, keeps_source: bool
    ) -> None:
        """Make the state that the step will write the current one, besides the one it reads."""
        source, cursor.tip = cursor.tip, target
        target.cursors.append(cursor)
        if source is not None:
            if keeps_source:
                self._keep(cursor, source, reason)
            source.cursors.remove(cursor)
            self._pin(source)

    def _keep(self, cursor: StateCursor, state: State, reason: int) -> None:
        """Hold the state that a branch moves on from."""
        branch = cursor.branch
        if reason and state.length == branch.start and branch.node.depth:
            self._attach(branch.node, state, reason)
        else:
            state.reason = max(state.reason, reason)
        if state.node is None and state.length not in cursor.kept_states:
            cursor.kept_states[state.length] = state
            state.keepers.append(cursor)

    def _attach(self, node: StateNode, state: State, reason: int) -> None:
        """Let a cache node hold a state, unless it has one for the same position."""
        existing = node.states.get(state.length)
        if existing is None and state.node is None:
            node.states[state.length], state.node = state, node
            existing = state
        if existing is not None:
            existing.reason = max(existing.reason, reason)

    def _detach(self, state: State) -> None:
        assert state.node is not None
        del state.node.states[state.length]
        state.node = None
        self._free_if_unused(state)

    def _drop_kept(self, cursor: StateCursor, position: int) -> None:
        state = cursor.kept_states.pop(position)
        state.keepers.remove(cursor)
        self._free_if_unused(state)

    def _drop_draft_states(self, cursor: StateCursor) -> None:
        """Drop the states kept for draft tokens that are verified by now."""
        if cursor.kept_states:
            for position in [p for p, state in cursor.kept_states.items() if not state.reason]:
                self._drop_kept(cursor, position)

    def _pin(self, state: State) -> None:
        state.num_pins += 1
        self._pinned.append(state)

    def _free_if_unused(self, state: State) -> None:
        is_needed = state.node or state.cursors or state.keepers or state.num_pins
        if not is_needed and state in self._states:
            self._states.remove(state)
            self._free.append(state.slot)
