"""The one mechanism of all policies: grow texts, judge them, prune them, within a budget.

A policy is a generator over a `Search`. Every verb here is a generator too: it yields events for
whoever watches, and returns what the policy goes on with:

    texts = yield from search.sample([search.root], width=8)
    yield from search.judge(texts)
    yield from search.win(texts)

Texts of one wave run in one batch, and share the past that they have in common. A text that may be
gone on with holds its pages; they are given back when it is pruned, when it ends, and when the
search is left in any way.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from unspool.decoding.search_tree import Node, SearchTree
from unspool.decoding.think.budget import Budget
from unspool.decoding.think.events import Event, Grown, Judged, Pruned, Spending, Won
from unspool.decoding.think.judge import Judge, LogprobJudge
from unspool.decoding.think.judging import Judging
from unspool.decoding.together import one_by_one
from unspool.decoding.written import Branches, mean_logprob
from unspool.engine.branch import Branch
from unspool.engine.ending import Ending, Limits
from unspool.engine.generation import Generation
from unspool.engine.judge import chosen_steps
from unspool.engine.steps import Step
from unspool.engine.stream import StepStream
from unspool.errors import UnspoolError
from unspool.session import Session

Result = TypeVar("Result")
Moves = Generator[Event, None, Result]
Piece = str | Sequence[int]


class Search:
    """A tree of texts on their way, who judges them, and what they may cost."""

    def __init__(self, lm: Session, start: Generation, judge: Judge | None, budget: Budget) -> None:
        self.lm, self.given, self.budget = lm, judge, budget  # None: nobody named a judge
        self.root = Node(start)
        self.leaf: Node | None = None  # the winner
        self.judge_by(judge or LogprobJudge())
        self.cancelled = False
        self._nodes = 1  # made so far
        self._samples = start.request.limits.sample  # the number of the next one
        self._held: dict[Node, Branch] = {}
        self._running: list[StepStream] = []

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self._release(list(self._held))

    def cancel(self) -> None:
        """End the search, from any thread: whoever runs it gets an error at its next move."""
        self.cancelled = True
        for steps in list(self._running):
            steps.close()
        self._judging.cancel()

    def judge_by(self, judge: Judge) -> None:
        """From now on let this one judge."""
        self._judging = Judging(judge, self.budget, self.root.generation)

    @property
    def judges_pieces(self) -> bool:
        """Whether the judge can judge a text that is not finished."""
        return self._judging.by.partial

    # -- what may follow a text ----------------------------------------------------------------

    def left(self, node: Node) -> int:
        """How many tokens may still follow a text."""
        if node.finished:
            return 0
        request = self.root.generation.request
        return max(0, request.limits.room(len(request.prompt)) - len(node.generation.steps))

    def affordable(self, node: Node) -> int:
        """How many tokens the budget has room for behind a text, its judging included."""
        known = self._judging.price(len(node.generation.steps))
        each = 1 + self._judging.price(1) - self._judging.price(0)
        return max(0, (self.budget.room - known) // each)

    def to_the_end(self, node: Node) -> int:
        """What it takes at the most to bring a text to its end and judge it."""
        left = self.left(node)
        return left + self._judging.price(len(node.generation.steps) + left)

    def best(self, nodes: Sequence[Node]) -> Node:
        """The text with the best score; one that the budget cut short only where all are."""
        scored = [node for node in nodes if node.score is not None]
        if not scored:
            raise UnspoolError(self._why_nothing(nodes))
        return max(self.ranked(scored), key=lambda node: (self.left(node) == 0, node.score))

    def ranked(self, nodes: Sequence[Node]) -> list[Node]:
        """The texts that have a score, the best first: of equally good ones the likeliest."""
        scored = [(node.score, node) for node in nodes if node.score is not None]
        scored.sort(key=lambda one: (-one[0], -mean_logprob(one[1].generation), one[1].number))
        return [node for _, node in scored]

    def _why_nothing(self, nodes: Sequence[Node]) -> str:
        if not nodes:
            return (
                f"the budget of {self.budget.limit} tokens was too small for a single text; "
                "give a larger one"
            )
        why = next((node.why for node in nodes if node.why), "it gave no score")
        count = "the only text" if len(nodes) == 1 else f"each of {len(nodes)} texts"
        return f"the judge failed on {count}: {why}"

    # -- the verbs -----------------------------------------------------------------------------

    def sample(
        self,
        nodes: Sequence[Node],
        width: int = 1,
        tokens: int | None = None,
        *,
        until: Sequence[str | int] = (),
        distinct: bool = False,
        spare: int = 0,
    ) -> Moves[list[Node]]:
        """Continue each text `width` times, by at most so many tokens, or until one of these
        strings or tokens is written. If `distinct`, equal continuations are one.

        As many are written at once as the budget has room for, with so many tokens to spare; what
        they leave serves the next.
        """
        jobs = [node for node in nodes for _ in range(width) if self.left(node)]
        grown: list[Node] = []
        yield from self._read_prompt()
        while jobs:
            caps = self._affordable(jobs, tokens, spare)
            if not caps:
                break
            grown += yield from self._write(jobs[: len(caps)], caps, until, distinct)
            jobs = jobs[len(caps) :]
        return grown

    def put(
        self, pieces: Sequence[tuple[Node, Piece]], *, distinct: bool = False
    ) -> Moves[list[Node]]:
        """Texts with something put behind them that the model did not write, as it judges it."""
        added: list[tuple[Node, list[int], list[int]]] = []
        for node, piece in pieces:
            so_far = [*node.generation.prompt, *node.generation.tokens]
            ids = self.lm.tokenizer.encode(piece) if isinstance(piece, str) else list(piece)
            if ids:
                self.lm.prompt_ids([*so_far, *ids])  # in the vocabulary, within the context
                added.append((node, so_far, ids))
        if not added:
            return []
        yield from self._read_prompt()
        self.budget.take("written", sum(len(ids) for _, _, ids in added))
        grown: list[Node] = []
        with Branches(self.lm.engine, self._adapter) as held:
            # Logits stand behind the token before: the last one need not be read.
            branches = [held.open([*so_far, *ids[:-1]]) for _, so_far, ids in added]
            wanted = [len(ids) for _, _, ids in added]
            found = self.lm.engine.extend_all([(one, ()) for one in branches], wanted=wanted)
            for (node, so_far, ids), logits in zip(added, found, strict=True):
                text = node.generation.fork()
                text.steps += chosen_steps(logits, ids, len(so_far), self.lm.engine.token_bytes)
                child = self._grow(node, text, distinct)
                if child is not None:
                    grown.append(child)
                    yield self._grown(child)
        yield self._spending()
        return grown

    def judge(self, nodes: Sequence[Node]) -> Moves[None]:
        """Give each text a score; one whose judge fails gets None, and the reason."""
        if not nodes:
            return
        verdicts = self._judging.verdicts([node.generation for node in nodes])
        for node, verdict in zip(nodes, verdicts, strict=True):
            node.score, node.why, node.answer = verdict.score, verdict.why, verdict.answer
            yield Judged(node.number, node.score, node.why, node.answer)
        yield self._spending()

    def prune(self, nodes: Sequence[Node]) -> Moves[None]:
        """Go on with these no more: their pages are given back now."""
        for node in nodes:
            node.pruned = True
            self._release([one for one in node.walk() if one in self._held])
            above = node.parent
            while above is not None and above.parent is not None:
                if not all(map(self._is_dead, above.children)):
                    break
                self._release([above] if above in self._held else [])
                above = above.parent
            yield Pruned(node.number)

    def win(self, nodes: Sequence[Node]) -> Moves[None]:
        """The best of these is the best text: all others are pruned, and the search is over."""
        self.leaf = self.best(nodes)
        way = SearchTree(self.root, self.leaf).best_path
        lost = [child for node in way for child in node.children if child not in way]
        yield from self.prune([node for node in lost if not node.pruned])
        yield Won(self.leaf.number, self.leaf.score)

    def rewound(self, node: Node, length: int) -> Moves[Node]:
        """Go back to the first so many tokens of a text; nothing is computed for that."""
        above = node
        while above.parent is not None and len(above.generation.steps) > length:
            above = above.parent
        if len(above.generation.steps) < length:
            above = self._add(above, node.generation.rewind(length))
            yield self._grown(above)
        if above is not node:
            yield from self.prune([node])
        self._hold(above)
        return above

    # -- below: the prompt, once ---------------------------------------------------------------

    @property
    def _adapter(self) -> str | None:
        return self.root.generation.request.adapter or self.lm.adapter

    def _read_prompt(self) -> Moves[None]:
        """Compute what all texts share, once; the last token each reads itself."""
        if self.cancelled:
            raise UnspoolError("the search was cancelled")
        if self.root in self._held:
            return
        prompt = self.root.generation.prompt
        read = prompt[:-1] or prompt
        self.budget.take("prompt", len(read))
        with self.lm.opened(read, self._adapter) as branch:
            self.budget.found(branch.reused)
            self.lm.engine.extend(branch)
        self._hold(self.root)
        yield self._spending()

    # -- below: writing ------------------------------------------------------------------------

    def _affordable(self, jobs: Sequence[Node], tokens: int | None, spare: int) -> list[int]:
        """How many tokens each of the first jobs may write, as far as the budget reaches; the
        judge's share is left for it. If not even one can be written in full, it is cut short."""
        caps: list[int] = []
        room = self.budget.room - spare
        for node in jobs:
            most = self.left(node) if tokens is None else min(tokens, self.left(node))
            price = most + self._judging.price(len(node.generation.steps) + most)
            if price > room:
                break
            caps.append(most)
            room -= price
        short = self.affordable(jobs[0]) - spare
        return caps or ([short] if short > 0 else [])

    def _write(
        self, jobs: Sequence[Node], caps: Sequence[int], until: Sequence[str | int], distinct: bool
    ) -> Moves[list[Node]]:
        """One wave: texts that are written in one batch."""
        texts = [self._draft(node, most, until) for node, most in zip(jobs, caps, strict=True)]
        self.budget.take("written", sum(caps))
        self._running, ahead = [], int(self.lm.engine.backend.overlaps)
        grown: list[Node] = []
        for number, error in one_by_one(self.lm, texts, self._running):
            if self.cancelled:
                raise UnspoolError("the search was cancelled")
            if error is not None:
                raise error
            parent, text = jobs[number], texts[number]
            # A device may have begun with the next token before it was known that none comes.
            computed = len(text.steps) - len(parent.generation.steps) + ahead
            self.budget.give_back("written", max(0, caps[number] - computed))
            child = self._grow(parent, text, distinct)
            if child is not None:
                grown.append(child)
                yield self._grown(child)
        yield self._spending()
        return grown

    def _draft(self, node: Node, most: int, until: Sequence[str | int]) -> Generation:
        """A text's continuation, to be written."""
        text = node.generation.fork()
        limits = self.root.generation.request.limits
        limits = replace(
            limits,
            # Numbered through the search: texts of the same length must not share their draws.
            sample=self._samples,
            max_tokens=len(text.steps) + most,
            pauses=tuple(one for one in until if isinstance(one, str)),
            end_ids=limits.end_ids | {one for one in until if isinstance(one, int)},
        )
        self._samples += 1
        text.request = replace(text.request, limits=limits, written=tuple(text.steps))
        return text

    def _grow(self, parent: Node, text: Generation, distinct: bool) -> Node | None:
        """A child with this text, unless it adds nothing, or is there already."""
        limits, start = text.request.limits, self.root.generation.request.limits
        text.steps = _told(text, replace(start, sample=limits.sample))
        if text.request.thinking is not None:
            text.steps = text.request.thinking.marked(text.steps)
        text.request = replace(text.request, limits=replace(start, sample=limits.sample))
        if len(text.steps) == len(parent.generation.steps):
            return None
        if distinct and any(child.generation.tokens == text.tokens for child in parent.children):
            return None
        return self._add(parent, text)

    def _add(self, parent: Node, text: Generation) -> Node:
        child = Node(text, parent, number=self._nodes)
        self._nodes += 1
        parent.children.append(child)
        self._hold(child)
        return child

    def _hold(self, node: Node) -> None:
        """Keep the pages of a text that may be gone on with."""
        if node not in self._held and self.left(node):
            text = node.generation
            self._held[node] = self.lm.engine.open([*text.prompt, *text.tokens], self._adapter)

    # -- below: telling, and giving back -------------------------------------------------------

    def _grown(self, node: Node) -> Grown:
        assert node.parent is not None
        steps = node.steps
        return Grown(
            node.number,
            node.parent.number,
            "".join(step.text for step in steps),
            tuple(step.token for step in steps),
            math.fsum(step.logprob for step in steps),
            self.left(node) == 0,
        )

    def _spending(self) -> Spending:
        spent = self.budget.spent
        return Spending(spent.prompt, spent.written, spent.judged, self.budget.limit)

    def _is_dead(self, node: Node) -> bool:
        """Whether nothing of a text is gone on with."""
        return node.pruned or (bool(node.children) and all(map(self._is_dead, node.children)))

    def _release(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            with contextlib.suppress(UnspoolError):  # the engine may be gone before us
                self.lm.engine.release(self._held.pop(node))


def _told(text: Generation, limits: Limits) -> list[Step]:
    """The steps with text and end as if they had been written in one go, by these limits.

    A piece by itself ends with half characters and held-back stop strings that the next piece may
    complete; it may end where the text does not; and one that was put there may go on behind the
    text's end.
    """
    # A piece that is as long as it may be is no reason for the text to end.
    ending = Ending(replace(limits, max_tokens=limits.context), len(text.prompt))
    pausing = text.request.limits.end_ids - limits.end_ids
    told: list[Step] = []
    for number, step in enumerate(text.steps):
        begun = ending.text.half
        shown, finish = ending.push(step.token, step.bytes, step.position + 1)
        if finish is None and step.finish_reason != "pause" and step.token not in pausing:
            finish = step.finish_reason
        if finish or number == len(text.steps) - 1:
            shown += ending.copy().finish()
        told.append(replace(step, text=shown, finish_reason=finish, begun=begun))
        if finish:
            break
    return told


def result_of(moves: Generator[Event, None, Result]) -> Result:
    """What a verb returns, where nobody watches."""
    while True:
        try:
            next(moves)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
