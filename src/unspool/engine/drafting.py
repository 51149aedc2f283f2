"""Speculative decoding inside the engine: a chain or a tree of draft tokens, verified in one step.

A draft tree is split into chains. The first chain continues the sequence and is computed in the
sequence's own row. Every other chain leaves its parent chain at some token and gets a row and a
separate branch, which shares the sequence's past. The tokens between that past and the start of
the chain are computed once, in the row they belong to, and written into the pages of the chain's
branch too (`StepBatch.echoes`); a backend that cannot do this computes them again. To the kernels
every row is ordinary text, so a token's logits are the same to the bit as without drafts.

After sampling, the sequence follows the draft tokens that match from chain to chain. The branch it
ends on becomes the branch of the sequence; the other branches are closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from unspool.engine.constraints import TokenConstraint
from unspool.engine.request import Drafter, DraftTree, ReadingDrafter, RecordingDrafter
from unspool.engine.results import StepQueue
from unspool.engine.scheduler import EngineTask, Scheduler
from unspool.engine.tree import Branch, Tree
from unspool.sampling import SamplingSettings
from unspool.sampling.picker import Ints, history_range


@dataclass(slots=True, eq=False)
class DraftChain:
    """Consecutive draft tokens, and the chains that leave it."""

    tokens: list[int] = field(default_factory=list)
    parent: DraftChain | None = None  # the chain that this one leaves ...
    offset: int = 0  # ... after this many of its tokens
    depth: int = 0  # of its first token; the token right after the text has depth 0
    # By offset and first token.
    children: dict[tuple[int, int], DraftChain] = field(default_factory=dict)
    row: EngineTask | None = None  # the row that computes it; None: not computed

    def tokens_before(self) -> list[int]:
        """Return the draft tokens between the text and the first token of this chain."""
        if self.parent is None:
            return []
        return self.parent.tokens_before() + self.parent.tokens[: self.offset]


def split_into_chains(draft: Sequence[int] | DraftTree) -> list[DraftChain]:
    """Split a draft into chains; the first one continues the text."""
    if not isinstance(draft, DraftTree):
        return [DraftChain(list(draft))]
    chains = [DraftChain()]
    ends: list[tuple[DraftChain, int]] = []  # of each node: its chain, and the length up to it
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        chain, length = ends[parent] if parent >= 0 else (chains[0], 0)
        if length < len(chain.tokens):  # the chain continues with another token: leave it here
            chain = DraftChain(parent=chain, offset=length, depth=chain.depth + length)
            assert chain.parent is not None
            chain.parent.children[length, token] = chain
            chains.append(chain)
        chain.tokens.append(token)
        ends.append((chain, len(chain.tokens)))
    return chains


def truncate_chains(chains: list[DraftChain], lengths: Sequence[int]) -> list[DraftChain]:
    """Cut each chain to its length, and drop the chains that lose their parent token."""
    remaining: list[DraftChain] = []
    for chain, length in zip(chains, lengths, strict=True):
        del chain.tokens[length:]
        parent = chain.parent
        has_parent = parent is None or (parent in remaining and chain.offset <= len(parent.tokens))
        if has_parent and (chain.tokens or parent is None):
            remaining.append(chain)
    for chain in remaining:
        chain.children = {key: child for key, child in chain.children.items() if child in remaining}
    return remaining


class PendingDraft:
    """A draft that is being verified, and how far the sampled tokens match it."""

    __slots__ = ("chain", "chains", "num_matched", "path", "rows")

    def __init__(self, chains: list[DraftChain] | None = None) -> None:
        self.chains = chains or [DraftChain()]
        self.rows: list[DraftRow] = []
        self.chain, self.num_matched = self.chains[0], 0  # current chain; tokens of it that match
        self.path: list[DraftChain] = [self.chain]  # the chains followed so far

    @property
    def main_tokens(self) -> list[int]:
        """The draft tokens in the sequence's own row."""
        return self.chains[0].tokens

    @property
    def num_accepted(self) -> int:
        """How many draft tokens matched."""
        return self.chain.depth + self.num_matched

    @property
    def num_tokens(self) -> int:
        """How many draft tokens are verified in this step."""
        return len(self.main_tokens) + sum(len(row.chain.tokens) for row in self.rows)

    @property
    def next_output(self) -> tuple[EngineTask | None, int]:
        """The row that holds the next token's output (None: the text's own), and its index."""
        chain, index = self.chain, self.num_matched
        return chain.row, index if chain.parent is None else index - 1

    def has_candidate(self) -> bool:
        """Return whether the draft proposes any token for the next position."""
        chain, index = self.chain, self.num_matched
        if index < len(chain.tokens):
            return True
        return any(
            offset == index and child.row is not None
            for (offset, _), child in chain.children.items()
        )

    def accept(self, token: int) -> bool:
        """Advance along the draft if it proposes this token; return whether it does."""
        chain, index = self.chain, self.num_matched
        if index < len(chain.tokens) and chain.tokens[index] == token:
            self.num_matched += 1
            return True
        child = chain.children.get((index, token))
        if child is None or child.row is None:
            return False
        self.chain, self.num_matched = child, 1
        self.path.append(child)
        return True


class DraftRow(EngineTask):
    """A side chain of a draft tree, computed in the same step as its sequence.

    The scheduler does not know it as a task; `Task.side_rows` brings it.
    """

    __slots__ = ("chain", "context", "sources")

    def __init__(self, context: DraftContext, chain: DraftChain, branch: Branch) -> None:
        main = context.row
        super().__init__(branch, num_logits=len(chain.tokens))
        self.context, self.chain = context, chain
        self.pick_floats, self.pick_ints = main.pick_floats, main.pick_ints
        self.sees_history, self.hidden_layers = main.sees_history, main.hidden_layers
        self.scheduled_start, self.scheduled_end = main.scheduled_start, branch.length
        # The rows and positions of the tokens between the text's past and this chain.
        self.sources: list[tuple[EngineTask, range]] = []

    def use_echoes(self) -> None:
        """Compute only the chain's own tokens; other rows write the ones before into its pages."""
        self.scheduled_start = self.scheduled_end - len(self.chain.tokens)
        end, chain = self.scheduled_start, self.chain
        while chain.parent is not None:
            row = chain.parent.row
            assert row is not None
            begin = row.scheduled_start if chain.parent.parent is None else end - chain.offset
            self.sources.append((row, range(begin, end)))
            end, chain = begin, chain.parent

    def penalty_ranges(self, count: int) -> tuple[Ints, list[tuple[int, int]]]:
        context, draft = self.context, [*self.chain.tokens_before(), *self.chain.tokens]
        history = np.concatenate((context.history, np.array(draft, np.int64)))
        lengths = range(len(history) - count + 1, len(history) + 1)
        ranges = [history_range(context.settings, context.prompt_length, n) for n in lengths]
        return history, ranges


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a draft row needs to know of its sequence."""

    row: EngineTask
    history: Ints
    prompt_length: int
    settings: SamplingSettings
    num_dropped: int  # tokens of the history that are not in the branch


def add_side_rows(
    draft: PendingDraft, context: DraftContext, tree: Tree, max_rows: int, *, echoes: bool
) -> None:
    """Add rows for the side chains, as far as there are pages and state slots for them."""
    branch = context.row.branch
    pending_tokens = context.history[branch.num_computed + context.num_dropped :].tolist()
    draft.chains[0].row = context.row
    if tree.states is not None:  # leave the state slots that running sequences need
        max_rows = min(max_rows, tree.states.spare)
    for chain in draft.chains[1:]:
        assert chain.parent is not None
        if chain.parent.row is None:
            continue
        tokens = [*chain.tokens_before(), *chain.tokens]
        if not max_rows:
            return
        fork = tree.draft_fork(branch, [*pending_tokens, *tokens], len(tokens))
        if fork is None:
            return
        row = chain.row = DraftRow(context, chain, fork)
        if echoes:
            row.use_echoes()
        draft.rows.append(row)
        max_rows -= 1


class SequenceDrafter:
    """The drafting part of a sequence: makes drafts, follows their verification, reports on them.

    Drafts come from the caller's drafter, or from a grammar or reasoning budget that leaves only
    one continuation. A drafter that raises is not called again; the sequence continues without it.
    """

    __slots__ = (
        "asked_at", "constraint", "draft", "drafter", "end_ids", "queue", "reader", "vocab_size",
    )  # fmt: skip

    def __init__(
        self,
        drafter: Drafter | None,
        constraint: TokenConstraint | None,
        queue: StepQueue,
        vocab_size: int,
        end_ids: frozenset[int],
    ) -> None:
        self.drafter, self.constraint = drafter, constraint
        self.reader = drafter if isinstance(drafter, ReadingDrafter) else None
        self.queue, self.vocab_size, self.end_ids = queue, vocab_size, end_ids
        self.draft = PendingDraft()
        self.asked_at: float | None = None  # when `propose` was called for the pending draft

    def first_needed(self, tokens: Ints, default: int) -> int:
        """Return the first position that must be computed again for its hidden states.

        At most `default`, the position from which on logits are needed. A drafter that raises here
        is dropped.
        """
        if self.reader is None:
            return default
        try:
            return max(0, min(default, self.reader.needs(tokens.tolist())))
        except Exception as error:
            self._drop_drafter(error)
            return default

    def hidden_layers(self) -> tuple[int, ...]:
        """Return the layers whose hidden states the drafter reads from the next step."""
        if self.reader is None:
            return ()
        try:
            return self.reader.reads
        except Exception as error:
            self._drop_drafter(error)
            return ()

    def verify(self, token: int) -> str | None:
        """Compare a sampled token with the draft: `accepted`, `rejected`, or None without one."""
        if not self.draft.has_candidate():
            return None
        if not self.draft.accept(token):
            return "rejected"
        self.queue.accepted += self.asked_at is not None
        return "accepted"

    def end_round(self, sequence: EngineTask, scheduler: Scheduler) -> None:
        """Report the verified draft to the drafter, and keep the branch that holds the result."""
        if sequence.hidden_layers:
            self._show_hidden_states(sequence)
        if self.asked_at is not None:
            self._report()
        if self.draft.rows:
            self._keep_branch(sequence, scheduler)

    def start_round(self, tokens: Ints, max_tokens: int) -> list[int]:
        """Make the next draft, at most `max_tokens` deep; return its tokens for the text's row."""
        self.draft = PendingDraft(self._propose(tokens, max_tokens) if max_tokens > 0 else None)
        return self.draft.main_tokens

    def _propose(self, tokens: Ints, max_tokens: int) -> list[DraftChain]:
        if self.constraint is not None:
            forced = self.constraint.forced_tokens()[:max_tokens]
            if forced:
                return [DraftChain(forced)]
        if self.drafter is None:
            return []
        self.asked_at = perf_counter()
        try:
            chains = split_into_chains(self.drafter.propose(tokens.tolist(), max_tokens))
            lengths = [self._num_usable(chain, max_tokens) for chain in chains]
            chains = truncate_chains(chains, lengths)
        except Exception as error:
            self._drop_drafter(error)
            return []
        self.queue.drafted += sum(len(chain.tokens) for chain in chains)
        return chains

    def _num_usable(self, chain: DraftChain, max_tokens: int) -> int:
        """Return how many tokens of a chain are valid; nothing may follow an end token."""
        before, num_usable = chain.tokens_before(), 0
        if any(token in self.end_ids for token in before):
            return 0
        chain.tokens = [int(token) for token in chain.tokens]
        for token in chain.tokens[: max(0, max_tokens - len(before))]:
            if not 0 <= token < self.vocab_size:
                break
            num_usable += 1
            if token in self.end_ids:
                break
        if self.constraint is not None and num_usable:
            num_allowed = self.constraint.num_accepted([*before, *chain.tokens[:num_usable]])
            num_usable = max(0, num_allowed - len(before))
        return num_usable

    def _show_hidden_states(self, sequence: EngineTask) -> None:
        """Give the drafter the hidden states of the accepted tokens, row by row."""
        rows = [chain.row or sequence for chain in self.draft.path]
        try:
            for inside in (inside for row in rows for inside in row.inside):
                if self.reader is not None and inside.residuals is not None:
                    self.reader.see(inside.first_position, inside.residuals)
        except Exception as error:
            self._drop_drafter(error)
        sequence.inside.clear()

    def _report(self) -> None:
        """Tell the drafter how many of its tokens were accepted, and in what time."""
        asked_at, self.asked_at = self.asked_at, None
        if self.drafter is None or asked_at is None:
            return
        seconds = perf_counter() - asked_at
        try:
            note = self.drafter.learn(self.draft.num_tokens, self.draft.num_accepted, seconds)
        except Exception as error:
            self._drop_drafter(error)
            return
        if note:
            self.queue.notes.append(note)

    def _keep_branch(self, sequence: EngineTask, scheduler: Scheduler) -> None:
        """Continue on the branch of the last accepted draft token; close the other branches."""
        last_row = self.draft.chain.row
        for row in self.draft.rows:
            if row is not last_row:
                scheduler.tree.close(row.branch, store=False)
        if isinstance(last_row, DraftRow):
            scheduler.change_branch(sequence, last_row.branch)
            scheduler.tree.advance(sequence.branch, last_row.scheduled_end)

    def close(self, tree: Tree, tokens: Ints) -> None:
        """Release the branches of the pending draft; show the text to a recording drafter."""
        for row in self.draft.rows:
            tree.close(row.branch, store=False)
        if isinstance(self.drafter, RecordingDrafter):
            try:
                self.drafter.record(tokens.tolist())
            except Exception as error:
                self._drop_drafter(error)

    def _drop_drafter(self, error: Exception) -> None:
        self.drafter, self.reader, self.asked_at = None, None, None
        self.queue.notes.append(f"drafting stopped: the drafter failed ({error!r})")
