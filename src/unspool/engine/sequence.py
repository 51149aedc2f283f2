"""One request that is being decoded: its tokens, when it ends, and what is computed next.

The same loop as `reference.py`, inside out: whenever the scheduler has computed the sequence, it
takes the sampled token, emits a step, and appends the token to its branch to be computed next.

A plain sequence has its tokens sampled by the backend within the step. What else a request may ask
for is a part that a plain sequence does not have (None):

- `drafting`: draft tokens are verified in one step, and those that match what is sampled are kept.
  The random number of a position does not depend on how its logits were computed, so a drafted text
  is the same text.
- `constraints`: a grammar, guards, a reasoning budget.
- `truncation`: the text may outgrow the context.

Sequences with a grammar, a guard, unusual sampling stages or explained steps get logits, and are
sampled together on the host by the chain of stages (`loop.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as AbstractSequence
from time import perf_counter

import numpy as np

from unspool.backends.step import Logits
from unspool.engine.constraints import RewindPoint, TextConstraints
from unspool.engine.drafting import DraftContext, SequenceDrafter, add_side_rows
from unspool.engine.request import (
    Drafter,
    Limits,
    Request,
    StopChecker,
    insert_tokens,
    truncation_note,
)
from unspool.engine.results import Step, StepQueue, explained_step, plain_step
from unspool.engine.scheduler import EngineTask, Scheduler
from unspool.engine.states import message_ends
from unspool.engine.tree import Branch
from unspool.errors import count
from unspool.sampling import Pick, RowInput, StageState, next_state
from unspool.sampling.picker import (
    POSITION,
    Ints,
    can_sample_on_device,
    encode_settings,
    history_range,
    needs_history,
)  # fmt: skip


class ContextTruncation:
    """The part of a sequence that may outgrow the context: which tokens the model still sees."""

    __slots__ = ("limits", "num_dropped")

    def __init__(self, limits: Limits, length: int) -> None:
        self.limits = limits
        self.num_dropped = limits.num_truncated(length)  # tokens that are not in the branch

    def update(self, length: int) -> bool:
        """Follow the text to this length; return whether other tokens are visible now."""
        before, self.num_dropped = self.num_dropped, self.limits.num_truncated(length)
        return self.num_dropped != before

    def note(self, length: int) -> str | None:
        """Describe what the model no longer saw at the end; None if it saw everything."""
        limits = self.limits
        if not self.num_dropped or limits.endless is None:
            return None
        return truncation_note(length, limits.context, limits.endless)


class Sequence(EngineTask):
    """A running request. Owned by the engine thread; not thread-safe."""

    __slots__ = (
        "constraints", "drafting", "finished", "history", "is_plain", "last_step_at", "length",
        "max_length", "num_inserted", "prompt_length", "queue", "request", "sampler_state",
        "scheduler", "stop_checker", "token_bytes", "truncation",
    )  # fmt: skip

    def __init__(
        self,
        scheduler: Scheduler,
        vocab_size: int,
        token_bytes: Callable[[int], bytes],
        request: Request,
        queue: StepQueue,
        drafter: Drafter | None,
        adapter: int = 0,
    ) -> None:
        limits = request.visible_limits
        self.scheduler, self.token_bytes = scheduler, token_bytes
        self.request, self.queue = request, queue
        self.prompt_length, self.num_inserted = len(request.prompt), request.num_inserted
        tokens = [*request.prompt, *(step.token for step in request.written)]
        self.length = len(tokens)
        self.max_length = max(self.prompt_length + limits.room(self.prompt_length), self.length)
        self.history = np.empty(self.max_length, np.int64)
        self.history[: self.length] = tokens
        self.stop_checker = StopChecker(limits, self.prompt_length)
        self.sampler_state: StageState | None = (
            None  # what sampling stages carry from token to token
        )
        self.finished = False
        self.constraints: TextConstraints | None = None
        if TextConstraints.needed_by(request):
            self.constraints = TextConstraints(request, token_bytes, vocab_size)
        self.drafting: SequenceDrafter | None = None
        constraint = None if self.constraints is None else self.constraints.tokens
        if drafter is not None or constraint is not None:
            ends = limits.end_ids
            self.drafting = SequenceDrafter(drafter, constraint, queue, vocab_size, ends)
        self.truncation: ContextTruncation | None = None
        if limits.endless is not None:
            self.truncation = ContextTruncation(limits, self.length)
        for step in request.written:
            self._read(step)
        visible = insert_tokens(limits.visible_tokens(tokens), request.inserts)
        branch = scheduler.tree.open(
            visible,
            cached=request.cached,
            adapter=adapter,
            interventions=request.branch_interventions(self.length),
        )
        super().__init__(branch, priority=request.priority)
        try:
            self._prepare()
        except BaseException:
            scheduler.tree.close(branch, store=False)
            raise

    def _prepare(self) -> None:
        """Choose where tokens are sampled, and report how much of the prompt is cached."""
        request, limits, settings = self.request, self.request.limits, self.request.settings
        self.cached = request.cached
        self.sees_history = needs_history(settings)
        # A reasoning budget alone forces tokens only where it ends the reasoning: those steps are
        # sampled on the host (see `samples_on_host`), all others on the backend.
        on_host = request.grammar is not None or request.guards is not None
        if self.drafting is not None and self.drafting.drafter is not None:
            on_host = on_host or self.drafting.constraint is not None
        if not (on_host or limits.top or limits.explain) and can_sample_on_device(settings):
            self.pick_floats, self.pick_ints = encode_settings(settings, limits.sample)
            # The random number of a token follows from its position in the whole text.
            self.pick_ints[POSITION] = self.num_dropped
        if self.drafting is not None:
            self.hidden_layers = self.drafting.hidden_layers()
        self.is_plain = (
            self.pick_floats is not None
            and self.cached
            and self.drafting is None
            and self.constraints is None
            and self.truncation is None
        )
        if self.is_plain and self.branch.state is None:
            self.ahead_until = min(self.max_length - 1 - self.num_dropped, limits.context)
        self.queue.prompt_reused = min(self.branch.num_reused, self.first_needed())
        self.queue.report_prompt(self.queue.prompt_reused)
        self.last_step_at = perf_counter()

    def _read(self, step: Step) -> None:
        """Take a token that was written and sent by an earlier request."""
        self.stop_checker.text.push(self.token_bytes(step.token))
        probability = step.probability
        if probability is None:
            probability = math.exp(step.logprob)
        self.sampler_state = next_state(self.request.settings, self.sampler_state, probability)
        if self.constraints is not None:
            if self.constraints.guard is not None:
                self._add_rewind_point(self.constraints)
            self.constraints.advance(step.token)

    def begin(self) -> None:
        """Hand the sequence to the scheduler, or end it if no token may follow."""
        if self.length >= self.max_length:
            self.end(None)
        else:
            self.scheduler.add(self)

    @property
    def num_dropped(self) -> int:
        """Tokens of the text that are not in the branch because they outgrew the context, less
        the inserts, which are in the branch and not in the text."""
        return -self.num_inserted if self.truncation is None else self.truncation.num_dropped

    @property
    def samples_on_host(self) -> bool:
        if self.pick_floats is None:
            return True
        return self.constraints is not None and self.constraints.is_forcing

    @property
    def waits_for_others(self) -> bool:
        """Whether it has drafts: it cannot run ahead, and would take turns with other texts."""
        return (
            self.pick_floats is not None
            and self.drafting is not None
            and self.drafting.drafter is not None
        )

    def first_needed(self) -> int:
        first = max(0, self.branch.length - max(1, self.num_logits))
        if self.drafting is None or not self.hidden_layers:
            return first
        return self.drafting.first_needed(self.history[: self.length], first)

    def find_state_marks(self, page_size: int) -> Collection[int]:
        inserts = self.request.inserts
        prompt = () if self.num_dropped > 0 else insert_tokens(self.request.prompt, inserts)
        before, marks = 0, set[int]()
        for insert in inserts:  # another insert there leaves what is before it
            marks.add(insert.at + before)
            before += len(insert.ids)
        ends = message_ends(prompt, self.request.limits.end_ids)
        return {self.branch.length - 1, *marks, *ends} - {0}

    def report_progress(self) -> None:
        self.queue.report_prompt(
            min(self.branch.num_computed, self.prompt_length + self.num_inserted)
        )

    def complete(self) -> None:
        """Take the tokens that the backend sampled: one, and as many draft tokens as match."""
        drafting = self.drafting
        if drafting is None:
            token, logprob = self.picked[0]
            if token >= 0:
                if self.has_placeholder and self.is_plain:  # most steps of many texts
                    if self._append_sampled(token, logprob, None):
                        self.branch.tail[-1] = token
                        self.has_placeholder, self.decoding = False, True
                        self.picked.clear()
                    return
                self.accept(token, logprob, None)
        else:
            matches = True
            while matches:
                row, index = drafting.draft.next_output
                token, logprob = (row or self).picked[index]
                # A negative token could not be sampled in a draft's row: the next step computes it
                # in the sequence's own row, which reports the error if it fails there too.
                matches = token >= 0 and self.accept(token, logprob, None)
        self.schedule_next()

    def run_ahead(self) -> bool:
        if (
            self.pick_floats is None
            or not self.cached
            or self.length + 1 >= self.max_length
            or self.branch.length >= self.request.limits.context  # the context is truncated first
            or (self.constraints is not None and self.constraints.may_force_soon)
            or (self.drafting is not None and self.drafting.drafter is not None)
        ):
            return False
        self.scheduler.tree.append(self.branch, [-1 - self.pick_number])
        return True

    def side_rows(self, max_rows: int) -> AbstractSequence[EngineTask]:
        assert self.drafting is not None
        scheduler, draft = self.scheduler, self.drafting.draft
        tree = scheduler.tree
        context = DraftContext(
            self,
            self.history[: self.length],
            self.prompt_length,
            self.request.settings,
            self.num_dropped,
        )
        # Leave a page for each other sequence: a draft must not cause a preemption.
        max_rows = max(0, min(max_rows, tree.available - len(scheduler)))
        add_side_rows(draft, context, tree, max_rows, echoes=scheduler.echoes)
        return draft.rows

    def penalty_ranges(self, count: int) -> tuple[Ints, list[tuple[int, int]]]:
        settings, prompt, length = self.request.settings, self.prompt_length, self.length
        if self.has_placeholder:  # a placeholder, until the token is sampled
            self.history[length] = -1 - self.pick_number
            length += 1
        elif self.drafting is not None:
            draft = self.drafting.draft.main_tokens
            self.history[length : length + len(draft)] = draft
        return self.history, [history_range(settings, prompt, length + n) for n in range(count)]

    def fail(self, error: BaseException) -> None:
        self.end(error)

    def row_input(self) -> RowInput:
        """Return what the sampling stages need to know to sample the next token."""
        constraints = self.constraints
        tokens = None if constraints is None else constraints.tokens
        return RowInput(
            self.history[: self.length],
            self.prompt_length,
            self.request.limits.sample,
            state=self.sampler_state,
            forbidden=() if constraints is None else constraints.forbidden_tokens(),
            allowed=None if tokens is None else tokens.mask(),
        )

    def next_logits(self) -> Logits:
        """Return the logits that the next token is sampled from, [1, V]."""
        row, index = (None, 0) if self.drafting is None else self.drafting.draft.next_output
        start = 0
        for logits in (row or self).logits:  # of each chunk
            if index < start + len(logits):
                return logits[index - start : index - start + 1]
            start += len(logits)
        raise AssertionError("no logits for the next token")

    def accept(self, token: int, logprob: float, pick: Pick | None) -> bool:
        """Append a sampled token to the text and emit its step.

        Returns:
            Whether the token matches the draft and the text continues: then the output of the next
            position is known too.
        """
        draft_result = None if self.drafting is None else self.drafting.verify(token)
        if pick is None and self.constraints is None:
            continues = self._append_sampled(token, logprob, draft_result)
        else:
            self.history[self.length] = token
            self.length += 1
            if self.constraints is not None:
                self.constraints.advance(token)
            continues = self._emit(token, logprob, pick, draft_result)
        return continues and draft_result == "accepted"

    def _append_sampled(self, token: int, logprob: float, draft_result: str | None) -> bool:
        """Append a token that the backend sampled and nothing constrains, and send its step. True
        if the text continues."""
        checker = self.stop_checker
        self.history[self.length] = token
        self.length = length = self.length + 1
        piece, partial = self.token_bytes(token), checker.text.partial_utf8
        text, finish = checker.push(token, piece, length)
        if finish:
            text += checker.finish()
            self.queue.stopped_by = checker.stopped_by
        now = perf_counter()
        seconds, self.last_step_at = now - self.last_step_at, now
        position = length - 1
        self.queue.add(
            plain_step(
                token, piece, text, logprob, position, seconds, finish, draft_result, partial
            )
        )
        if finish:
            self.end(None)
        return not finish

    def schedule_next(self) -> None:
        """Append the sampled tokens and a new draft to the branch, to be computed next."""
        if self.finished:
            return
        tree, drafting = self.scheduler.tree, self.drafting
        if drafting is not None:
            drafting.end_round(self, self.scheduler)
        branch = self.branch
        draft: list[int] = []
        if self.has_placeholder:  # the branch has a placeholder for the token
            branch.tail[-1] = self.picked[0][0]
            self.has_placeholder = False
        else:
            if self.truncation is not None and self.truncation.update(self.length):
                branch = self._reopen_branch()
            else:
                # The last token is always run, also where a guard rewound the text to it.
                num_known = self.length - 1 - self.num_dropped
                if num_known < branch.length:  # rejected draft tokens are not worth storing
                    is_draft = drafting is not None and bool(drafting.draft.main_tokens)
                    tree.rewind(branch, num_known, store=not is_draft)
                tree.append(branch, [int(self.history[self.length - 1])])
            if drafting is not None:
                draft = drafting.start_round(self.history[: self.length], self._draft_room())
                tree.append(branch, draft)
        if drafting is not None:
            self.hidden_layers = drafting.hidden_layers()
            self.has_side_rows = len(drafting.draft.chains) > 1
        self.num_logits = len(draft) + 1
        self.decoding = True
        self.picked.clear()
        self.logits.clear()
        if not self.cached:  # compute the whole text again
            tree.preempt(branch)

    def _draft_room(self) -> int:
        """Return how many draft tokens fit before the text's end and the next truncation."""
        until_truncation = self.request.limits.context - self.length + self.num_dropped
        return min(self.max_length - self.length - 1, until_truncation)

    def _reopen_branch(self) -> Branch:
        """Continue on a new branch with the tokens that are visible now; they are read again."""
        tree, request = self.scheduler.tree, self.request
        if self.pick_floats is not None:
            self.pick_ints[POSITION] = self.num_dropped
        visible = request.limits.visible_tokens(self.history[: self.length].tolist())
        interventions = request.branch_interventions(self.length)
        adapter = self.branch.adapter
        branch = tree.open(
            visible, cached=self.cached, adapter=adapter, interventions=interventions
        )
        self.scheduler.change_branch(self, branch)
        return branch

    def _emit(
        self, token: int, logprob: float, pick: Pick | None, draft_result: str | None
    ) -> bool:
        """Send the step of a token, or rewind if a guard objects. True if the text continues."""
        constraints, checker = self.constraints, self.stop_checker
        piece = self.token_bytes(token)
        partial, num_retracted = checker.text.partial_utf8, 0
        if constraints is None:
            new_text, finish = checker.push(token, piece, self.length)
            is_reasoning = False
        else:
            is_reasoning, must_end = constraints.is_reasoning, constraints.must_end
            before = checker.copy() if constraints.guard is not None else checker
            new_text, finish = checker.push(token, piece, self.length, must_end)
            if constraints.guard is not None:
                assert pick is not None
                verdict = constraints.guard.push(token, piece, logprob, pick.entropy)
                if finish and verdict.kind == "keep":
                    verdict = constraints.guard.finish()
                if verdict.kind == "rewind":
                    assert verdict.to is not None
                    self.stop_checker = before
                    self._rewind(verdict.to + len(self.request.written), str(verdict.reason))
                    return False
                if verdict.kind == "stop":
                    finish = "guard"
                    self.queue.notes.append(f"stopped: {verdict.reason}")
        if finish:
            new_text += checker.finish()
            self.queue.stopped_by = checker.stopped_by
        now = perf_counter()
        seconds, self.last_step_at = now - self.last_step_at, now
        position = self.length - 1
        if pick is None:
            step = plain_step(
                token, piece, new_text, logprob, position, seconds, finish, draft_result, partial,
                is_reasoning,
            )  # fmt: skip
        else:
            self.sampler_state = pick.state
            if constraints is not None:
                num_retracted, constraints.num_retracted = constraints.num_retracted, 0
                if constraints.guard is not None:
                    self._add_rewind_point(constraints)
            step = explained_step(
                pick, position, new_text, self.token_bytes, seconds, finish, draft_result,
                num_retracted, partial_utf8=partial, is_reasoning=is_reasoning,
            )  # fmt: skip
        self.queue.add(step)
        if finish:
            self.end(None)
            return False
        return True

    def _add_rewind_point(self, constraints: TextConstraints) -> None:
        point = RewindPoint(self.sampler_state, self.stop_checker.copy())
        constraints.rewind_points.append(point)

    def _rewind(self, num_written: int, reason: str) -> None:
        """Drop the written tokens from `num_written` on; the step of the last was not sent."""
        assert self.constraints is not None
        num_dropped = self.length - self.prompt_length - num_written
        self.queue.notes.append(f"rewound {count(num_dropped, 'token')}: {reason}")
        point = self.constraints.rewind(num_written, num_dropped)
        self.length = self.prompt_length + num_written
        if point is None:
            self.sampler_state = None
            limits = self.request.visible_limits
            self.stop_checker = StopChecker(limits, self.prompt_length)
        else:
            self.sampler_state = point.sampler_state
            self.stop_checker = point.stop_checker.copy()

    def end(self, error: BaseException | None) -> None:
        """Release the branch and end the stream, with an error if there is one. Idempotent."""
        if self.finished:
            return
        self.finished = True
        note = None if self.truncation is None else self.truncation.note(self.length)
        if note:
            self.queue.notes.append(note)
        try:
            self.scheduler.remove(self)
            self.scheduler.tree.close(self.branch, store=error is None)
            if self.drafting is not None:
                self.drafting.close(self.scheduler.tree, self.history[: self.length])
        finally:  # the reader must not wait for more steps
            self.queue.end(error)
