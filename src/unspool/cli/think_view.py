"""A search as it grows, for a terminal: the tree of texts with their scores, and what was spent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unspool.decoding.search.tree import (
    BudgetUsed,
    NodeAdded,
    NodePruned,
    NodeScored,
    SearchEvent,
    SearchFinished,
)
from unspool.engine.results import brief

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree


@dataclass(slots=True)
class _Shown:
    """What is known of a node."""

    text: str = ""
    score: float | None = None
    why: str = ""
    fate: str = ""  # ended, pruned, failed, best
    below: list[int] = field(default_factory=list)
    parent: int | None = None


class TreeView:
    """The tree that events have told of so far."""

    def __init__(self) -> None:
        self.nodes: dict[int, _Shown] = {0: _Shown()}
        self.spending: BudgetUsed | None = None

    def take(self, event: SearchEvent) -> None:
        """One more event."""
        if isinstance(event, NodeAdded):
            fate = "ended" if event.finished else ""
            self.nodes[event.node] = _Shown(event.text, fate=fate, parent=event.parent)
            self.nodes[event.parent].below.append(event.node)
        elif isinstance(event, NodeScored):
            node = self.nodes[event.node]
            node.score, node.why = event.score, event.why
            node.fate = "failed" if event.score is None else node.fate
        elif isinstance(event, NodePruned):
            self.nodes[event.node].fate = "pruned"
        elif isinstance(event, SearchFinished):
            self.nodes[event.node].fate = "best"
        elif isinstance(event, BudgetUsed):
            self.spending = event

    def spent(self) -> str:
        """The tokens so far, in a line."""
        told = self.spending
        if told is None:
            return "reading the prompt"
        total = told.prompt + told.written + told.judged
        of = "" if told.limit is None else f" of {told.limit:,}"
        judged = f", {told.judged:,} judged" if told.judged else ""
        return f"{total:,}{of} tokens: {told.prompt:,} read, {told.written:,} written{judged}"

    def rich(self, width: int, height: int) -> Tree:
        """The tree, in at most so many lines: where it has more, what was pruned goes first."""
        from rich.text import Text
        from rich.tree import Tree

        way, tree = self._way(), Tree(Text(self.spent(), "dim"))
        hidden = self._hidden(height - 2)

        def add(tree: Tree, number: int, room: int) -> None:
            shown = [one for one in self.nodes[number].below if one not in hidden]
            for child in shown:
                add(tree.add(self._label(child, child in way, room)), child, room - 4)
            if left := len(self.nodes[number].below) - len(shown):
                tree.add(Text(f"{left} more", "dim"))

        add(tree, 0, width - 6)
        return tree

    def _hidden(self, room: int) -> set[int]:
        """What does not fit: pruned and failed nodes with all below them, the oldest first; then
        the oldest of the rest. The way to the best stays."""
        left, hidden, way, cut = len(self.nodes) - 1, set[int](), self._way(), set[int | None]()
        for fates in (("pruned", "failed"), ("", "ended")):
            for number, node in self.nodes.items():
                if left <= room:
                    return hidden
                if number and node.fate in fates and number not in hidden | way:
                    family = self._family(number) - hidden
                    hidden |= family
                    left -= len(family) - (node.parent not in cut)  # a line says how many more
                    cut = (cut | {node.parent}) - hidden
        return hidden

    def _family(self, number: int) -> set[int]:
        return {number}.union(*map(self._family, self.nodes[number].below))

    def _way(self) -> set[int]:
        """From the best node up."""
        best = next((n for n, node in self.nodes.items() if node.fate == "best"), None)
        way: set[int] = set()
        while best is not None:
            way.add(best)
            best = self.nodes[best].parent
        return way

    def _label(self, number: int, on_the_way: bool, room: int) -> Text:
        from rich.text import Text

        node = self.nodes[number]
        score = "" if node.score is None else f"{node.score:.3f} "
        said = f"{score}{brief(node.text, max(8, room - len(score) - len(node.fate) - 3))}"
        if node.fate:
            said += f" ({node.fate})"
        if node.fate == "failed":
            said = f"{said}: {node.why}"[:room]
        dim = node.fate in ("pruned", "failed")
        return Text(said, "bold green" if on_the_way else "dim" if dim else "", no_wrap=True)
