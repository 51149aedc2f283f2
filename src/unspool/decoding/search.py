"""Tree search: continue in several ways, score, keep the best, and again.

    found = tree_search(lm, "Roses are red,", width=4, tokens=6, keep=2, depth=3, seed=1)
    print(found)                   # the whole tree with its scores, pruned branches too
    found.best.text                # the best leaf, a Generation

Where beam search goes token by token and asks only the model, this goes by pieces of text, and
anybody may propose them (`expand`) and judge them (`scorer`): a reward model, a test, a person.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from unspool.decoding.written import Branches, Prompt, Scorer, blank, judged, whole
from unspool.engine.ending import Ending
from unspool.engine.generation import Generation
from unspool.engine.judge import chosen_steps
from unspool.engine.options import Options
from unspool.engine.steps import Step, brief
from unspool.engine.stream import StepStream
from unspool.errors import SettingsError, UnspoolError
from unspool.notebook import escape, picture
from unspool.session import Session

if TYPE_CHECKING:
    from rich.tree import Tree as RichTree

Expander = Callable[[Generation], Iterable[str | Sequence[int]]]
"""Proposes what may follow a text: pieces of text, or token ids."""


@dataclass(eq=False, slots=True)
class Node:
    """A place in the tree: a text, and the ways in which it was continued."""

    generation: Generation  # the whole text up to here
    parent: Node | None = None
    score: float | None = None  # None at the root, which nobody judges
    pruned: bool = False
    children: list[Node] = field(default_factory=list)

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
        if node.score is None:
            return f"prompt of {len(node.generation.prompt)} tokens"
        shown = "".join(step.text for step in node.steps)
        written = repr(shown) if shown else str([step.token for step in node.steps])
        fate = "pruned" if node.pruned else "ended" if node.finished else ""
        fate = "best" if node is self.leaf else fate
        return f"{node.score:.3f} {written}" + (f" ({fate})" if fate else "")

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


def tree_search(
    lm: Session,
    prompt: Prompt,
    *,
    width: int = 4,
    tokens: int = 16,
    keep: int = 2,
    depth: int = 4,
    scorer: Scorer | None = None,
    expand: Expander | None = None,
    **options: Unpack[Options],
) -> SearchTree:
    """Search `depth` levels deep for the continuation with the highest score.

    width     into how many continuations each kept text is sampled,
    tokens    of how many tokens each.
    keep      how many of a level's texts are continued; the others are pruned.
    scorer    judges the text up to a node (a `Generation`), higher is better; without one, the
              mean log-probability of its tokens does.
    expand    proposes the continuations in place of `width` samples.

    The rest as in `lm.stream` (seed, temperature, stop, ...). The best leaf is the best of those
    that were kept and either ended by themselves or stand on the last level.
    """
    for name, value in (("width", width), ("tokens", tokens), ("keep", keep), ("depth", depth)):
        whole(name, value)
    if options.get("max_tokens") is not None:
        raise SettingsError("a search writes tokens * depth tokens; give these, not max_tokens")
    rest = cast(dict[str, Any], {**options, "max_tokens": tokens * depth})
    root = Node(blank(lm, prompt, **rest))
    level, leaves = [root], []
    for _ in range(depth):
        if expand is not None:
            grown = _propose(lm, level, expand)
        else:
            grown = _sample(lm, level, width, tokens)
        for node in level:
            if not node.children:  # nothing was proposed: this is as far as it goes
                leaves.append(node)
        for child in grown:
            child.score = judged(scorer, child.generation)
        grown.sort(key=lambda node: -(node.score or 0.0))
        for child in grown[keep:]:
            child.pruned = True
        leaves += [node for node in grown[:keep] if node.finished]
        level = [node for node in grown[:keep] if not node.finished]
        if not level:
            break
    leaves += level
    return SearchTree(root, max(leaves, key=_value))


def _value(node: Node) -> float:
    return float("-inf") if node.score is None else node.score


def _grow(parent: Node, generation: Generation) -> Node | None:
    """A child with this text, unless it is there already or adds nothing."""
    generation.steps = _told(generation)
    same = any(child.generation.tokens == generation.tokens for child in parent.children)
    if same or len(generation.steps) == len(parent.generation.steps):
        return None
    child = Node(generation, parent)
    parent.children.append(child)
    return child


def _told(generation: Generation) -> list[Step]:
    """The steps with text and end as if they had been written in one go.

    A piece by itself ends with half characters and held-back stop strings that the next piece may
    complete; and a proposed piece may go on behind the end of the text.
    """
    limits, steps = generation.request.limits, generation.steps
    # A piece that is as long as it may be is no reason for the text to end.
    ending = Ending(replace(limits, max_tokens=limits.context), len(generation.prompt))
    steps_told: list[Step] = []
    for number, step in enumerate(steps):
        shown, finish = ending.push(step.token, step.bytes, step.position + 1)
        finish = finish or step.finish_reason
        if finish or number == len(steps) - 1:
            shown += ending.copy().finish()
        steps_told.append(replace(step, text=shown, finish_reason=finish))
        if finish:
            break
    return steps_told


# -- ways to go on -----------------------------------------------------------------------------


def _sample(lm: Session, level: Sequence[Node], width: int, tokens: int) -> list[Node]:
    """`width` samples behind each text, all in one batch; the engine finds what they share."""
    started: list[tuple[Node, Generation, StepStream]] = []
    try:
        for parent in level:
            for _ in range(width):
                text = parent.generation.fork()
                # Numbered through the level: texts of the same length must not share their draws.
                most = len(text.steps) + tokens
                steps = lm.write_on(text, sample=len(started), max_tokens=most)
                started.append((parent, text, steps))
        for _, text, steps in started:
            for _ in text.extend(steps):
                pass
    finally:
        for _, _, steps in started:
            steps.close()
    grown = [_grow(parent, text) for parent, text, _ in started]
    return [child for child in grown if child is not None]


def _propose(lm: Session, level: Sequence[Node], expand: Expander) -> list[Node]:
    """What the caller's expander proposes, as the model judges it; one batch for all."""
    proposed: list[tuple[Node, list[int], list[int]]] = []  # the text so far, and what is added
    for parent in level:
        try:
            pieces = list(expand(parent.generation))
        except Exception as error:
            raise UnspoolError(f"expand raised {type(error).__name__}: {error}") from error
        so_far = [*parent.generation.prompt, *parent.generation.tokens]
        for piece in pieces:
            added = lm.tokenizer.encode(piece) if isinstance(piece, str) else list(piece)
            if added:
                lm.prompt_ids([*so_far, *added])  # in the vocabulary, within the context
                proposed.append((parent, so_far, added))
    if not proposed:
        return []
    with Branches(lm.engine, lm.adapter) as held:
        # Logits stand behind the token before: the last one need not be read.
        branches = [held.open([*so_far, *added[:-1]]) for _, so_far, added in proposed]
        longest = max(len(added) for _, _, added in proposed)
        logits = lm.engine.extend_all([(branch, ()) for branch in branches], wanted=longest)
    grown: list[Node] = []
    for (parent, so_far, added), rows in zip(proposed, logits, strict=True):
        text = parent.generation.fork()
        given = rows[-len(added) :]
        text.steps += chosen_steps(given, added, len(so_far), lm.engine.token_bytes)
        child = _grow(parent, text)
        if child is not None:
            grown.append(child)
    return grown
