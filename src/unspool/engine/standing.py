"""Recurrent states as the tree knows them: where each is, and who needs it."""

from __future__ import annotations

from typing import Protocol

from unspool.engine.state_policy import GUESS


class State:
    """What a model knows of a text at one place, and who needs it."""

    __slots__ = ("keepers", "length", "node", "pins", "slot", "tips", "used", "why")

    def __init__(self, slot: int, length: int) -> None:
        self.slot = slot
        self.length = length  # tokens that it has read
        self.why = GUESS
        self.node: Page | None = None  # in whose page that is, if the page is in the index
        self.tips: list[Standing] = []  # of branches that stand here
        self.keepers: list[Standing] = []  # of branches that hold it for their unfinished page
        self.pins = 0  # it is read or written by the step that is being made
        self.used = 0  # when, by the pool's clock

    @property
    def running(self) -> bool:
        """Whether a text that runs stands here, or may have to go back to here at once."""
        if any(tip.running for tip in self.tips):
            return True
        return self.why == GUESS and any(keeper.running for keeper in self.keepers)


class Standing:
    """Where a branch stands: its state, and others on its way that no node of the index holds."""

    __slots__ = ("branch", "captures", "junction", "kept", "running", "source", "tip")

    def __init__(self, branch: Text) -> None:
        self.branch = branch
        self.tip: State | None = None  # None: nothing is read yet. While a step runs, behind that
        self.kept: dict[int, State] = {}  # by their lengths
        self.junction = -1  # a place that texts part at, to be marked when it is passed
        self.running = False
        self.source: State | None = None  # what the step reads that was planned last
        self.captures: list[State] = []  # ... and what it is to write on the way


class Page(Protocol):
    """What is asked of a node of the prefix index."""

    states: dict[int, State]
    depth: int
    live: int

    @property
    def parent(self) -> Page | None: ...


class Text(Protocol):
    """What is asked of a branch."""

    start: int
    computed: int
    length: int
    provisional: int | None

    @property
    def node(self) -> Page: ...

    @property
    def borrowed(self) -> Page | None: ...

    @property
    def state(self) -> Standing | None: ...


def standing_of(branch: Text) -> Standing:
    assert branch.state is not None, "a branch of a model without states"
    return branch.state


def is_alone(state: State) -> bool:
    """Whether only one branch needs it, which may overwrite it."""
    return state.node is None and len(state.tips) == 1 and not (state.keepers or state.pins)


def state_before(node: Page, length: int, pages: int | None = None) -> State | None:
    """The last state before `length` that a node or those before it hold; gone up so many pages."""
    place: Page | None = node
    while place is not None and pages != 0:
        found = [state for at, state in place.states.items() if at < length]
        if found:
            return max(found, key=lambda state: state.length)
        place = place.parent
        pages = None if pages is None else pages - 1
    return None
