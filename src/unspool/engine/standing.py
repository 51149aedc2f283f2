"""Recurrent states in the tree: where each one is, and which branches need it."""

from __future__ import annotations

from typing import Protocol

from unspool.engine.state_policy import DRAFT


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
