"""The search mechanism that all policies share: grow texts, score them, prune them, in a budget.

A policy is a generator over a `Search`. Every operation is a generator too: it yields events and
returns a value to the policy:

    texts = yield from search.sample([search.root], width=8)
    yield from search.score(texts)
    yield from search.select_best(texts)

Texts sampled by one call run in one batch and share their common prefix. A text that can still be
continued holds its KV-cache pages until it is pruned, finished, or the search ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from unspool.backends.interventions import BranchInterventions
from unspool.decoding.batch import run_in_order
from unspool.decoding.branches import HeldBranches, mean_logprob
from unspool.decoding.search.tree import (
    BudgetUsed,
    NodeAdded,
    NodePruned,
    NodeScored,
    SearchEvent,
    SearchFinished,
    SearchNode,
    SearchTree,
    TokenBudget,
)
from unspool.decoding.search.verifiers import LogprobVerifier, Verifier, VerifierRunner
from unspool.engine.generation import Generation
from unspool.engine.request import Limits, StopChecker
from unspool.engine.results import Step, StepStream
from unspool.engine.score import chosen_steps
from unspool.engine.tree import Branch
from unspool.errors import UnspoolError
from unspool.session import Session

Result = TypeVar("Result")
Moves = Generator[SearchEvent, None, Result]
Piece = str | Sequence[int]


class Search:
    """A tree of partial texts, the verifier that scores them, and the token budget."""

    def __init__(
        self, lm: Session, start: Generation, judge: Verifier | None, budget: TokenBudget
    ) -> None:
        self.lm, self.budget = lm, budget
        self.requested_verifier = judge  # None: the caller named none
        self.root = SearchNode(start)
        self.leaf: SearchNode | None = None  # the winner
        self.use_verifier(judge or LogprobVerifier())
        self.cancelled = False
        self._nodes = 1  # created so far
        self._samples = start.request.limits.sample  # index of the next sample
        self._branches: dict[SearchNode, Branch] = {}
        self._running: list[StepStream] = []

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self._release(list(self._branches))

    def cancel(self) -> None:
        """End the search, from any thread; its next operation raises `UnspoolError`."""
        self.cancelled = True
        for steps in list(self._running):
            steps.close()
        self._scoring.cancel()

    def use_verifier(self, judge: Verifier) -> None:
        """Score with this verifier from now on."""
        self._scoring = VerifierRunner(judge, self.budget, self.root.generation)

    @property
    def scores_partial(self) -> bool:
        """Whether the verifier can score an unfinished text."""
        return self._scoring.verifier.partial

    # -- limits and ranking --------------------------------------------------------------------

    def remaining(self, node: SearchNode) -> int:
        """Number of tokens that may still be added to a text."""
        if node.finished:
            return 0
        request = self.root.generation.request
        return max(0, request.limits.room(len(request.prompt)) - len(node.generation.steps))

    def affordable_tokens(self, node: SearchNode) -> int:
        """Number of tokens the budget allows after a text, the cost of scoring included."""
        base = self._scoring.estimate_cost(len(node.generation.steps))
        per_token = 1 + self._scoring.estimate_cost(1) - self._scoring.estimate_cost(0)
        return max(0, (self.budget.remaining - base) // per_token)

    def cost_to_finish(self, node: SearchNode) -> int:
        """Upper bound of the tokens needed to finish a text and score it."""
        remaining = self.remaining(node)
        return remaining + self._scoring.estimate_cost(len(node.generation.steps) + remaining)

    def best(self, nodes: Sequence[SearchNode]) -> SearchNode:
        """The text with the best score. A text cut short by the budget wins only if all are."""
        scored = [node for node in nodes if node.score is not None]
        if not scored:
            raise UnspoolError(self._why_nothing(nodes))
        return max(self.rank(scored), key=lambda node: (self.remaining(node) == 0, node.score))

    def rank(self, nodes: Sequence[SearchNode]) -> list[SearchNode]:
        """Texts that have a score, best first; ties go to the higher mean log-probability."""
        scored = [(node.score, node) for node in nodes if node.score is not None]
        scored.sort(
            key=lambda entry: (-entry[0], -mean_logprob(entry[1].generation), entry[1].number)
        )
        return [node for _, node in scored]

    def _why_nothing(self, nodes: Sequence[SearchNode]) -> str:
        if not nodes and self.budget.limit is None:
            return "max_tokens leaves no room for a token"
        if not nodes:
            return (
                f"the budget of {self.budget.limit} tokens was too small for a single text; "
                "give a larger one"
            )
        why = next((node.why for node in nodes if node.why), "it returned no score")
        count = "the only text" if len(nodes) == 1 else f"each of {len(nodes)} texts"
        return f"the verifier failed on {count}: {why}"

    # -- operations ----------------------------------------------------------------------------

    def sample(
        self,
        nodes: Sequence[SearchNode],
        width: int = 1,
        tokens: int | None = None,
        *,
        until: Sequence[str | int] = (),
        distinct: bool = False,
        reserve: int = 0,
    ) -> Moves[list[SearchNode]]:
        """Continue each text `width` times by at most `tokens` tokens, or until one of the strings
        or token ids in `until` is written. With `distinct`, equal continuations become one node.

        Runs as many continuations per batch as the budget allows, keeping `reserve` tokens back;
        tokens that a batch does not use are available to the next.
        """
        jobs = [node for node in nodes for _ in range(width) if self.remaining(node)]
        grown: list[SearchNode] = []
        yield from self._prefill_prompt()
        while jobs:
            caps = self._token_caps(jobs, tokens, reserve)
            if not caps:
                break
            grown += yield from self._write_batch(jobs[: len(caps)], caps, until, distinct)
            jobs = jobs[len(caps) :]
        return grown

    def append(
        self, pieces: Sequence[tuple[SearchNode, Piece]], *, distinct: bool = False
    ) -> Moves[list[SearchNode]]:
        """Append given text or token ids to nodes; the model computes their log-probabilities."""
        added: list[tuple[SearchNode, list[int], list[int]]] = []
        for node, piece in pieces:
            prefix = [*node.generation.prompt, *node.generation.tokens]
            ids = self.lm.tokenizer.encode(piece) if isinstance(piece, str) else list(piece)
            if ids:
                self.lm.prompt_ids([*prefix, *ids])  # in the vocabulary, within the context
                added.append((node, prefix, ids))
        if not added:
            return []
        yield from self._prefill_prompt()
        self.budget.reserve("written", sum(len(ids) for _, _, ids in added))
        grown: list[SearchNode] = []
        with HeldBranches(self.lm.engine, self._adapter, self._interventions) as open_branches:
            # The logits of a token come from the position before it: skip the last token.
            branches = [open_branches.open([*prefix, *ids[:-1]]) for _, prefix, ids in added]
            num_logits = [len(ids) for _, _, ids in added]
            logits_rows = self.lm.engine.extend_all(
                [(branch, ()) for branch in branches], num_logits=num_logits
            )
            for (node, prefix, ids), logits in zip(added, logits_rows, strict=True):
                text = node.generation.fork()
                text.steps += chosen_steps(logits, ids, len(prefix), self.lm.engine.token_bytes)
                child = self._add_text(node, text, distinct)
                if child is not None:
                    grown.append(child)
                    yield self._added_event(child)
        yield self._budget_event()
        return grown

    def score(self, nodes: Sequence[SearchNode]) -> Moves[None]:
        """Score each text; where the verifier fails, the score is None and `why` has the reason."""
        if not nodes:
            return
        verdicts = self._scoring.score([node.generation for node in nodes])
        for node, verdict in zip(nodes, verdicts, strict=True):
            node.score, node.why, node.answer = verdict.score, verdict.why, verdict.answer
            yield NodeScored(node.number, node.score, node.why, node.answer)
        yield self._budget_event()

    def prune(self, nodes: Sequence[SearchNode]) -> Moves[None]:
        """Stop continuing these texts and release their pages now."""
        for node in nodes:
            node.pruned = True
            self._release(
                [descendant for descendant in node.walk() if descendant in self._branches]
            )
            ancestor = node.parent
            while ancestor is not None and ancestor.parent is not None:
                if not all(map(self._is_dead, ancestor.children)):
                    break
                self._release([ancestor] if ancestor in self._branches else [])
                ancestor = ancestor.parent
            yield NodePruned(node.number)

    def select_best(self, nodes: Sequence[SearchNode]) -> Moves[None]:
        """Make the best of these the result, and prune all others."""
        self.leaf = self.best(nodes)
        path = SearchTree(self.root, self.leaf).best_path
        losers = [child for node in path for child in node.children if child not in path]
        yield from self.prune([node for node in losers if not node.pruned])
        yield SearchFinished(self.leaf.number, self.leaf.score)

    def rewind(self, node: SearchNode, length: int) -> Moves[SearchNode]:
        """Return the node of a text's first `length` tokens; computes nothing."""
        ancestor = node
        while ancestor.parent is not None and len(ancestor.generation.steps) > length:
            ancestor = ancestor.parent
        if len(ancestor.generation.steps) < length:
            ancestor = self._add_node(ancestor, node.generation.rewind(length))
            yield self._added_event(ancestor)
        if ancestor is not node:
            yield from self.prune([node])
        self._hold_pages(ancestor)
        return ancestor

    # -- the prompt ----------------------------------------------------------------------------

    @property
    def _adapter(self) -> str | None:
        return self.root.generation.request.adapter or self.lm.adapter

    @property
    def _interventions(self) -> BranchInterventions | None:
        return self.root.generation.request.branch_interventions()

    def _prefill_prompt(self) -> Moves[None]:
        """Prefill the prompt once for all texts; each text computes its last token itself."""
        if self.cancelled:
            raise UnspoolError("the search was cancelled")
        if self.root in self._branches:
            return
        prompt = self.root.generation.prompt
        read = prompt[:-1] or prompt
        self.budget.reserve("prompt", len(read))
        with self.lm.open_branch(read, self._adapter, self._interventions) as branch:
            self.budget.credit_cached(branch.num_reused)
            self.lm.engine.extend(branch)
        self._hold_pages(self.root)
        yield self._budget_event()

    # -- writing -------------------------------------------------------------------------------

    def _token_caps(
        self, jobs: Sequence[SearchNode], tokens: int | None, reserve: int
    ) -> list[int]:
        """Token limits of the first jobs that the budget covers, the cost of scoring included. If
        it covers not even one, the first job gets a reduced limit."""
        caps: list[int] = []
        room = self.budget.remaining - reserve
        for node in jobs:
            cap = self.remaining(node) if tokens is None else min(tokens, self.remaining(node))
            cost = cap + self._scoring.estimate_cost(len(node.generation.steps) + cap)
            if cost > room:
                break
            caps.append(cap)
            room -= cost
        reduced_cap = self.affordable_tokens(jobs[0]) - reserve
        return caps or ([reduced_cap] if reduced_cap > 0 else [])

    def _write_batch(
        self,
        jobs: Sequence[SearchNode],
        caps: Sequence[int],
        until: Sequence[str | int],
        distinct: bool,
    ) -> Moves[list[SearchNode]]:
        """Write these continuations in one batch."""
        texts = [self._continuation(node, cap, until) for node, cap in zip(jobs, caps, strict=True)]
        self.budget.reserve("written", sum(caps))
        self._running, num_extra = [], int(self.lm.engine.backend.overlaps)
        grown: list[SearchNode] = []
        for number, error in run_in_order(self.lm, texts, self._running):
            if self.cancelled:
                raise UnspoolError("the search was cancelled")
            if error is not None:
                raise error
            parent, text = jobs[number], texts[number]
            # A pipelined backend may have computed one more token before the text ended.
            computed = len(text.steps) - len(parent.generation.steps) + num_extra
            self.budget.refund("written", max(0, caps[number] - computed))
            child = self._add_text(parent, text, distinct)
            if child is not None:
                grown.append(child)
                yield self._added_event(child)
        yield self._budget_event()
        return grown

    def _continuation(self, node: SearchNode, cap: int, until: Sequence[str | int]) -> Generation:
        """Build the request that continues a text."""
        text = node.generation.fork()
        limits = self.root.generation.request.limits
        limits = replace(
            limits,
            # Unique in the search: texts of the same length must not share random numbers.
            sample=self._samples,
            max_tokens=len(text.steps) + cap,
            pauses=tuple(marker for marker in until if isinstance(marker, str)),
            end_ids=limits.end_ids | {marker for marker in until if isinstance(marker, int)},
        )
        self._samples += 1
        text.request = replace(text.request, limits=limits, written=tuple(text.steps))
        return text

    def _add_text(self, parent: SearchNode, text: Generation, distinct: bool) -> SearchNode | None:
        """Add a child with this text; None if it adds nothing or is a duplicate."""
        limits, start = text.request.limits, self.root.generation.request.limits
        text.steps = _reapply_limits(text, replace(start, sample=limits.sample))
        if text.request.thinking is not None:
            text.steps = text.request.thinking.mark_steps(text.steps)
        text.request = replace(text.request, limits=replace(start, sample=limits.sample))
        if len(text.steps) == len(parent.generation.steps):
            return None
        if distinct and any(child.generation.tokens == text.tokens for child in parent.children):
            return None
        return self._add_node(parent, text)

    def _add_node(self, parent: SearchNode, text: Generation) -> SearchNode:
        child = SearchNode(text, parent, number=self._nodes)
        self._nodes += 1
        parent.children.append(child)
        self._hold_pages(child)
        return child

    def _hold_pages(self, node: SearchNode) -> None:
        """Hold the pages of a text that can be continued."""
        if node not in self._branches and self.remaining(node):
            text = node.generation
            self._branches[node] = self.lm.engine.open(
                [*text.prompt, *text.tokens], self._adapter, self._interventions
            )

    # -- events and release --------------------------------------------------------------------

    def _added_event(self, node: SearchNode) -> NodeAdded:
        assert node.parent is not None
        steps = node.steps
        return NodeAdded(
            node.number,
            node.parent.number,
            "".join(step.text for step in steps),
            tuple(step.token for step in steps),
            math.fsum(step.logprob for step in steps),
            self.remaining(node) == 0,
        )

    def _budget_event(self) -> BudgetUsed:
        spent = self.budget.spent
        return BudgetUsed(spent.prompt, spent.written, spent.judged, self.budget.limit)

    def _is_dead(self, node: SearchNode) -> bool:
        """Whether neither the text nor any continuation of it is still active."""
        return node.pruned or (bool(node.children) and all(map(self._is_dead, node.children)))

    def _release(self, nodes: Sequence[SearchNode]) -> None:
        for node in nodes:
            with contextlib.suppress(UnspoolError):  # the engine may be closed already
                self.lm.engine.release(self._branches.pop(node))


def _reapply_limits(text: Generation, limits: Limits) -> list[Step]:
    """Recompute text pieces and finish reasons as if all steps were written by one request.

    A piece alone ends with incomplete UTF-8 and held-back stop strings that the next piece may
    complete; it may end where the text does not; and appended tokens may go past the text's end.
    """
    # A piece that reached its own token limit does not end the text.
    ending = StopChecker(replace(limits, max_tokens=limits.context), len(text.prompt))
    pause_ids = text.request.limits.end_ids - limits.end_ids
    steps: list[Step] = []
    for number, step in enumerate(text.steps):
        partial_utf8 = ending.text.partial_utf8
        text_piece, finish = ending.push(step.token, step.bytes, step.position + 1)
        if finish is None and step.finish_reason != "pause" and step.token not in pause_ids:
            finish = step.finish_reason
        if finish or number == len(text.steps) - 1:
            text_piece += ending.copy().finish()
        steps.append(
            replace(step, text=text_piece, finish_reason=finish, partial_utf8=partial_utf8)
        )
        if finish:
            break
    return steps


def run_moves(moves: Generator[SearchEvent, None, Result]) -> Result:
    """Run an operation, ignore its events and return its value."""
    while True:
        try:
            next(moves)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
