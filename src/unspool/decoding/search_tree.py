"""The tree of a search: every text, its score, whether it was pruned, and the best leaf."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unspool.engine.generation import Generation
from unspool.engine.steps import Step, brief
from unspool.errors import count
from unspool.notebook import escape_html, notebook_html

if TYPE_CHECKING:
    from rich.tree import Tree as RichTree


@dataclass(eq=False, slots=True)
class SearchNode:
    """A node of the search tree: a text and its continuations."""

    generation: Generation  # the text from the prompt to this node
    parent: SearchNode | None = None
    score: float | None = (
        None  # None at the root, and where the text was not scored or scoring failed
    )
    pruned: bool = False
    children: list[SearchNode] = field(default_factory=list)
    number: int = 0  # in order of creation; 0 is the root
    why: str = ""  # explanation by the verifier, such as why it failed
    answer: Hashable | None = None  # extracted by the verifier

    def __repr__(self) -> str:
        score = "" if self.score is None else f"{self.score:.3f} "
        text = brief("".join(step.text for step in self.steps))
        return f"<SearchNode {score}{text}, {len(self.children)} children>"

    @property
    def steps(self) -> list[Step]:
        """Steps that this node adds to its parent's text."""
        return self.generation.steps[len(self.parent.generation.steps) if self.parent else 0 :]

    @property
    def finished(self) -> bool:
        """Whether the text has ended by itself and cannot be continued."""
        steps = self.generation.steps
        return bool(steps) and steps[-1].finish_reason in ("stop", "context")

    def walk(self) -> Iterator[SearchNode]:
        """Iterate over this node and its descendants."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class SearchTree:
    """All nodes of a search, and its best leaf."""

    root: SearchNode
    leaf: SearchNode  # the best one

    def __repr__(self) -> str:
        nodes = sum(1 for _ in self.root.walk())
        return f"<SearchTree of {nodes} nodes, best {brief(self.best.text)}>"

    def _repr_html_(self) -> str:
        lines = "\n".join(self._lines(self.root, "", ""))
        return notebook_html(f'<pre tabindex="0">{escape_html(lines)}</pre>')

    @property
    def best(self) -> Generation:
        """The best leaf, as a `Generation`."""
        return self.leaf.generation

    @property
    def best_path(self) -> list[SearchNode]:
        """Nodes from the root to the best leaf."""
        path = [self.leaf]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def __str__(self) -> str:
        return "\n".join(self._lines(self.root, "", ""))

    def _lines(self, node: SearchNode, lead: str, below: str) -> Iterator[str]:
        yield lead + self.label(node)
        for number, child in enumerate(node.children):
            last = number == len(node.children) - 1
            yield from self._lines(
                child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")
            )

    def label(self, node: SearchNode) -> str:
        """One line per node: score, text (or token ids), and its state."""
        if node.parent is None:
            return f"prompt of {count(len(node.generation.prompt), 'token')}"
        text = "".join(step.text for step in node.steps)
        quoted = repr(text) if text else str([step.token for step in node.steps])
        state = "pruned" if node.pruned else "ended" if node.finished else ""
        state = "best" if node is self.leaf else state
        score = "" if node.score is None else f"{node.score:.3f} "
        return score + quoted + (f" ({state})" if state else "")

    def rich(self) -> RichTree:
        """Build a rich tree for a terminal: `rich.print(tree.rich())`."""
        from rich.text import Text
        from rich.tree import Tree

        on_path = set(map(id, self.best_path))

        def styled_label(node: SearchNode) -> Text:
            style = "bold green" if id(node) in on_path else "dim" if node.pruned else ""
            return Text(self.label(node), style=style)

        def add(tree: Tree, node: SearchNode) -> Tree:
            for child in node.children:
                add(tree.add(styled_label(child)), child)
            return tree

        return add(Tree(styled_label(self.root)), self.root)
