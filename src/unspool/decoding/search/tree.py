"""What a search builds and reports: its tree of texts, token budget, events and result."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from unspool.decoding.branches import check_int
from unspool.engine.generation import Generation
from unspool.engine.results import Step, brief
from unspool.errors import UnspoolError, count
from unspool.notebook import escape_html, note_html, notebook_html

if TYPE_CHECKING:
    from rich.tree import Tree as RichTree


# -- The tree of a search: every text, its score, whether it was pruned, and the best leaf


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

    root: SearchNode  # the prompt
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


# -- The token budget of a search: a hard limit, as tokens are reserved before they are
# computed


CostKind = Literal["prompt", "written", "judged"]


@dataclass(slots=True)
class Spent:
    """Tokens computed so far, by purpose."""

    prompt: int = 0  # not counting tokens from the prefix cache
    written: int = 0  # including discarded ones
    judged: int = 0  # read by the verifier's model

    @property
    def total(self) -> int:
        return self.prompt + self.written + self.judged

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return {**asdict(self), "total": self.total}


class TokenBudget:
    """A token limit and the tokens reserved so far."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = None if limit is None else check_int("budget", limit)
        self.spent = Spent()
        self._cached_tokens = 0  # prompt tokens that came from the prefix cache

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be computed."""
        if self.limit is None:
            return sys.maxsize
        return self.limit - self.spent.total - self._cached_tokens

    def reserve(self, kind: CostKind, tokens: int) -> None:
        """Reserve tokens that are about to be computed."""
        if tokens > self.remaining:
            raise UnspoolError(
                f"{tokens} more tokens do not fit the budget of {self.limit}, of which "
                f"{max(0, self.remaining)} are left; give a larger one"
            )
        setattr(self.spent, kind, getattr(self.spent, kind) + tokens)

    def refund(self, kind: CostKind, tokens: int) -> None:
        """Return reserved tokens that were not computed."""
        setattr(self.spent, kind, getattr(self.spent, kind) - tokens)

    def credit_cached(self, tokens: int) -> None:
        """Count prompt tokens found in the prefix cache as not spent. They still use up the limit:
        the result of a search must not depend on the state of the cache."""
        self.refund("prompt", tokens)
        self._cached_tokens += tokens


# -- Events of a running search, for a terminal or the page


@dataclass(frozen=True, slots=True)
class _Event:
    event: ClassVar[str]  # name in JSON

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object with the event's name and fields."""
        fields = asdict(self)
        answer = fields.get("answer")
        if answer is not None and not isinstance(answer, str | int | float):
            fields["answer"] = str(answer)
        return {"event": self.event, **fields}


@dataclass(frozen=True, slots=True)
class NodeAdded(_Event):
    """A new node: a text was continued."""

    event = "grown"
    node: int  # numbered in order of creation; 0 is the prompt
    parent: int
    text: str  # added to the parent's text
    tokens: tuple[int, ...]  # ids of the added tokens
    logprob: float  # sum over the added tokens
    finished: bool  # the text cannot be continued


@dataclass(frozen=True, slots=True)
class NodeScored(_Event):
    """A text was scored; None if the verifier failed, with the reason in `why`."""

    event = "judged"
    node: int
    score: float | None
    why: str = ""
    answer: Hashable | None = None


@dataclass(frozen=True, slots=True)
class NodePruned(_Event):
    """A text was dropped and its pages released."""

    event = "pruned"
    node: int


@dataclass(frozen=True, slots=True)
class BudgetUsed(_Event):
    """Tokens computed so far, and the limit."""

    event = "spending"
    prompt: int
    written: int
    judged: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class SearchFinished(_Event):
    """The search is finished; `node` is its best text."""

    event = "won"
    node: int
    score: float | None


SearchEvent = NodeAdded | NodeScored | NodePruned | BudgetUsed | SearchFinished


# -- The result of `lm.think`: the best text, the search tree and the tokens spent


@dataclass(frozen=True, slots=True, repr=False)
class Thought:
    """The best text of a search, with its tree and cost."""

    tree: SearchTree  # pruned nodes included
    policy: str  # its name
    budget: int | None  # token limit
    spent: Spent  # tokens computed
    answers: dict[Hashable, float] = field(default_factory=dict)  # weighted votes, highest first
    seconds: float = 0.0  # of the whole search

    @property
    def best(self) -> Generation:
        """The best text, as a `Generation`."""
        return self.tree.best

    @property
    def text(self) -> str:
        """The best text."""
        return self.best.text

    @property
    def score(self) -> float | None:
        """Score of the best text; None if it was not scored."""
        return self.tree.leaf.score

    @property
    def answer(self) -> Hashable | None:
        """Extracted answer of the best text, if the verifier extracts answers."""
        return self.tree.leaf.answer

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        score = "" if self.score is None else f", score {self.score:.4g}"
        return f"<Thought {brief(self.text)}, {self.policy}{score}, {self._price()}>"

    def _price(self) -> str:
        limit = "" if self.budget is None else f" of {self.budget}"
        return f"{self.spent.total}{limit} tokens"

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object, without the tree."""
        return {
            **self.best.to_dict(),
            "policy": self.policy,
            "score": self.score,
            "budget": self.budget,
            "spent": self.spent.to_dict(),
            "answers": {str(answer): votes for answer, votes in self.answers.items()},
            "seconds": self.seconds,
        }

    def _repr_html_(self) -> str:
        tree = (
            f'<details><summary>the search</summary><pre tabindex="0">{escape_html(str(self.tree))}'
        )
        text = f'<div class="text">{escape_html(self.text)}</div>'
        return notebook_html(
            text, note_html(f"{self.policy}, {self._price()}"), f"{tree}</pre></details>"
        )
