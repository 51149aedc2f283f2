"""The tree of a search: every text that was looked at, what became of it, and which was best."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unspool.engine.generation import Generation
from unspool.engine.steps import Step, brief
from unspool.errors import count
from unspool.notebook import escape, picture

if TYPE_CHECKING:
    from rich.tree import Tree as RichTree


@dataclass(eq=False, slots=True)
class Node:
    """A place in the tree: a text, and the ways in which it was continued."""

    generation: Generation  # the whole text up to here
    parent: Node | None = None
    score: float | None = None  # None at the root, and where nobody judged or the judge failed
    pruned: bool = False
    children: list[Node] = field(default_factory=list)
    number: int = 0  # in the order in which they were made; 0 is the root
    why: str = ""  # what the judge had to say, such as why it failed
    answer: Hashable | None = None  # what the judge found the text to answer

    def __repr__(self) -> str:
        score = "" if self.score is None else f"{self.score:.3f} "
        said = brief("".join(step.text for step in self.steps))
        return f"<Node {score}{said}, {len(self.children)} children>"

    @property
    def steps(self) -> list[Step]:
        """What this node added to its parent's text."""
        return self.generation.steps[len(self.parent.generation.steps) if self.parent else 0 :]

    @property
    def finished(self) -> bool:
        """Whether the text ended here by itself: nothing can follow."""
        steps = self.generation.steps
        return bool(steps) and steps[-1].finish_reason in ("stop", "context")

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class SearchTree:
    """Everything a search looked at."""

    root: Node
    leaf: Node  # the best one

    def __repr__(self) -> str:
        nodes = sum(1 for _ in self.root.walk())
        return f"<SearchTree of {nodes} nodes, best {brief(self.best.text)}>"

    def _repr_html_(self) -> str:
        lines = "\n".join(self._lines(self.root, "", ""))
        return picture(f'<pre tabindex="0">{escape(lines)}</pre>')

    @property
    def best(self) -> Generation:
        """The text of the best leaf."""
        return self.leaf.generation

    @property
    def best_path(self) -> list[Node]:
        """From the root to the best leaf."""
        path = [self.leaf]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def __str__(self) -> str:
        return "\n".join(self._lines(self.root, "", ""))

    def _lines(self, node: Node, lead: str, below: str) -> Iterator[str]:
        yield lead + self.label(node)
        for number, child in enumerate(node.children):
            last = number == len(node.children) - 1
            yield from self._lines(
                child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")
            )

    def label(self, node: Node) -> str:
        """A node in one line: score, text (token ids where there is no text), and its fate."""
        if node.parent is None:
            return f"prompt of {count(len(node.generation.prompt), 'token')}"
        shown = "".join(step.text for step in node.steps)
        written = repr(shown) if shown else str([step.token for step in node.steps])
        fate = "pruned" if node.pruned else "ended" if node.finished else ""
        fate = "best" if node is self.leaf else fate
        score = "" if node.score is None else f"{node.score:.3f} "
        return score + written + (f" ({fate})" if fate else "")

    def rich(self) -> RichTree:
        """The tree for a terminal: `rich.print(found.rich())`."""
        from rich.text import Text
        from rich.tree import Tree

        way = set(map(id, self.best_path))

        def shown(node: Node) -> Text:
            style = "bold green" if id(node) in way else "dim" if node.pruned else ""
            return Text(self.label(node), style=style)

        def add(tree: Tree, node: Node) -> Tree:
            for child in node.children:
                add(tree.add(shown(child)), child)
            return tree

        return add(Tree(shown(self.root)), self.root)
