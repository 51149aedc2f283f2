"""The futures of a text: its most likely continuations as a tree with their exact probabilities.

    lm.futures("The sky is", mass=0.01, depth=6).leaves

Nothing is sampled. The continuation with the largest probability mass is extended first, by all of
its next tokens that are likely enough, until every remaining one is below `mass`, or the tree has
as many nodes as allowed. Several continuations are computed in one step of the engine: forks of the
text. The probabilities of a node's children and its `other_probability` sum to 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from unspool.decoding.branches import HeldBranches, Prompt, check_int, prepare_generation
from unspool.engine.generation import Generation
from unspool.engine.loop import concat_logits
from unspool.engine.results import brief
from unspool.engine.tree import Branch
from unspool.errors import SettingsError, check_number, count
from unspool.notebook import escape_html, notebook_html
from unspool.sampling import Chain, RowInput, score
from unspool.session import Session
from unspool.text.tokenizer.pieces import incomplete_utf8

MAX_DEPTH = 256
MAX_NODES = 20_000
MAX_WIDTH = 1_000
_BATCH = 16  # continuations that are computed together
_MAX_HELD = 64  # branches that stay open; others are found in the prefix cache again


@dataclass(eq=False, slots=True)
class FutureNode:
    """A token that may come, and what may come after it."""

    number: int  # in order of creation; 0 is the text itself
    parent: FutureNode | None  # None: the text itself
    token: int  # -1: the text itself
    text: str  # readable; a character of several tokens is at the last of them
    probability: float  # after the text up to the parent
    mass: float  # the product of the probabilities from the start
    depth: int  # tokens from the start
    finished: bool = False  # it ends the text, or the context is full
    children: list[FutureNode] = field(default_factory=list)  # most likely first
    other_probability: float | None = None  # of all tokens without a node; None: not computed
    partial_utf8: bytes = b""  # an incomplete character after this token

    def __repr__(self) -> str:
        return f"<FutureNode {self.mass:.3g} {brief(self.text)}, {len(self.children)} children>"

    @property
    def path(self) -> list[FutureNode]:
        """The nodes from the first token after the text to this one."""
        nodes = []
        node: FutureNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def tokens(self) -> list[int]:
        """The tokens from the end of the text to this one."""
        return [node.token for node in self.path]

    def walk(self) -> Iterator[FutureNode]:
        """This node and all after it, the most likely ones first at each node."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(reversed(node.children))


@dataclass(frozen=True, slots=True)
class Futures:
    """The most likely continuations of a text."""

    start: Generation  # the text that they continue
    root: FutureNode  # the text itself; its children are the first tokens
    sampled: bool  # probabilities after the sampling stages; False: of the model
    seconds: float  # that growing took

    def __repr__(self) -> str:
        nodes = sum(1 for _ in self.root.walk())
        return f"<Futures of {count(nodes - 1, 'token')}, most likely {brief(self.leaves[0][1])}>"

    @property
    def leaves(self) -> list[tuple[float, str]]:
        """The mass and the text of every continuation, the largest mass first."""
        leaves = [node for node in self.root.walk() if not node.children]
        ranked = sorted(leaves, key=lambda node: -node.mass)
        return [(node.mass, "".join(part.text for part in node.path)) for node in ranked]

    def open(self, node: FutureNode) -> Generation:
        """The text up to a node, which can be resumed."""
        return self.start.choose(node.tokens) if node.tokens else self.start.fork()

    def __str__(self) -> str:
        lines = [f"{mass:7.2%} {text!r}" for mass, text in self.leaves]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return notebook_html(f'<pre tabindex="0">{escape_html(str(self))}</pre>')


class FutureGrowth:
    """Grows the tree; `grow` yields each node when its children are known. Its options are those
    of `lm.futures`."""

    def __init__(
        self,
        lm: Session,
        prompt: Prompt | Generation,
        *,
        at: int | None = None,
        mass: float,
        depth: int,
        nodes: int,
        width: int,
        sampled: bool = False,
        seconds: float | None = None,
        **options: Any,
    ) -> None:
        if isinstance(prompt, Generation):
            if options:
                raise SettingsError(
                    f"{next(iter(options))} is an option of the text, which has its own; "
                    "give a prompt instead of a generation"
                )
            self.start = prompt.fork() if at is None else prompt.rewind(at)
        elif at is not None:
            raise SettingsError("at counts the tokens of a generation; a prompt has none")
        else:
            self.start = prepare_generation(lm, prompt, max_tokens=0, **options)
        check_number("mass", mass, 0.0, 1.0)
        self.lm, self.mass, self.sampled, self.seconds = lm, float(mass), sampled, seconds
        self.depth = check_int("depth", depth, most=MAX_DEPTH)
        self.max_nodes = check_int("nodes", nodes, most=MAX_NODES)
        self.width = check_int("width", width, most=MAX_WIDTH)
        self.request = self.start.request
        if sampled:
            self._check_settings()
        self.tokens = [*self.start.prompt, *self.start.tokens]
        partial = lm.partial_utf8(self.tokens)
        self.root = FutureNode(0, None, -1, "", 1.0, 1.0, 0, partial_utf8=partial)
        self.num_nodes = 1
        self.is_complete = False  # neither the number of nodes nor the time has ended it

    def _check_settings(self) -> None:
        request = self.request
        for name, is_set in (
            ("a grammar", request.grammar is not None),
            ("a guard", request.guards is not None),
            ("mirostat", request.settings.mirostat_tau > 0),
        ):
            if is_set:
                raise SettingsError(
                    f"probabilities after sampling are not defined with {name}, which depends on "
                    "the whole text; use sampled=False"
                )

    def run(self) -> Futures:
        """Grow the complete tree."""
        since = perf_counter()
        for _ in self.grow():
            pass
        return Futures(self.start, self.root, self.sampled, perf_counter() - since)

    def grow(self) -> Iterator[FutureNode]:
        """Yield each node when its children are known, the largest mass first."""
        lm, until = self.lm, None if self.seconds is None else perf_counter() + self.seconds
        waiting: list[tuple[float, int, FutureNode]] = [(-1.0, 0, self.root)]
        num_waiting: dict[int, int] = {}  # children in `waiting`, by number of the parent
        computed: dict[int, Branch] = {}  # branches of nodes with such children
        request = self.request
        with HeldBranches(lm.engine, request.adapter, request.branch_interventions()) as branches:
            while waiting and self.num_nodes < self.max_nodes:
                if until is not None and perf_counter() > until:
                    return
                batch = [heapq.heappop(waiting)[2] for _ in range(min(_BATCH, len(waiting)))]
                for node in batch:
                    if node.parent is not None:
                        num_waiting[node.parent.number] -= 1
                # A branch that is not held is found in the prefix cache again.
                kept = [number for number in computed if num_waiting[number]][-_MAX_HELD:]
                forks = [node for node in batch if node.parent and node.parent.number in computed]
                parents = [node.parent.number for node in forks if node.parent]
                moved = branches.move([computed[number] for number in (*kept, *parents)])
                computed = dict(zip(kept, moved, strict=False))
                rows = [
                    (node, branch, [node.token])
                    for node, branch in zip(forks, moved[len(kept) :], strict=True)
                ]
                rows += [
                    (node, branches.open([*self.tokens, *node.tokens]), [])
                    for node in batch
                    if node not in forks
                ]
                logits = lm.engine.extend_all([(branch, tokens) for _, branch, tokens in rows])
                nodes = [node for node, _, _ in rows]
                likeliest = self._next_tokens(nodes, concat_logits(logits))
                for (node, branch, _), tokens, chances in zip(rows, *likeliest, strict=True):
                    self._add_children(node, tokens, chances)
                    growing = [child for child in node.children if self._can_grow(child)]
                    for child in growing:
                        heapq.heappush(waiting, (-child.mass, child.number, child))
                    num_waiting[node.number] = len(growing)
                    computed[node.number] = branch
                    yield node
            self.is_complete = not waiting and self.num_nodes < self.max_nodes

    def _can_grow(self, node: FutureNode) -> bool:
        return not node.finished and node.depth < self.depth

    def _next_tokens(self, nodes: Sequence[FutureNode], logits: Any) -> tuple[Any, Any]:
        """The most likely next tokens and their probabilities, both [nodes, width]."""
        width = min(self.width, logits.shape[-1])
        if not self.sampled:
            scores = score(logits, [0] * len(nodes), width)
            return scores.top_tokens, np.exp(scores.top_logprobs)
        request = self.request
        inputs = [
            RowInput([*self.tokens, *node.tokens], len(request.prompt), request.limits.sample)
            for node in nodes
        ]
        return Chain([request.settings] * len(nodes)).likeliest(logits, inputs, width)

    def _add_children(self, node: FutureNode, tokens: Any, chances: Any) -> None:
        """Add the tokens whose mass is large enough."""
        limits, listed = self.request.limits, 0.0
        for token, chance in zip(tokens.tolist(), chances.tolist(), strict=True):
            mass = node.mass * chance
            if chance <= 0 or mass < self.mass or self.num_nodes >= self.max_nodes:
                break
            length = len(self.tokens) + node.depth + 1
            child = FutureNode(
                self.num_nodes,
                node,
                token,
                self.lm.readable(token, node.partial_utf8),
                chance,
                mass,
                node.depth + 1,
                token in limits.end_ids or length >= limits.context,
                partial_utf8=incomplete_utf8(node.partial_utf8 + self.lm.engine.token_bytes(token)),
            )
            node.children.append(child)
            self.num_nodes += 1
            listed += chance
        node.other_probability = max(0.0, 1.0 - listed)
