"""One text that is being written: its history, how it ends, its guard, grammar and drafter.

The same loop as `plain.py`, turned inside out: whenever the scheduler has had the text computed,
it takes the picked token, says what it shows, and puts it behind its branch to be computed next.
A text may bring a draft of what comes next; the tokens of the draft are checked in one step, and
those that would have been picked anyway are kept. Because the draw of a position does not depend on
how the logits were computed, a drafted text is the same text.

A text whose steps nobody wants explained, without grammar, guard or unusual stages, has its tokens
picked by the backend, within the step. The others get logits, and are picked for together by the
chain (`picking.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Several
from time import perf_counter

import numpy as np

from unspool.backends.step import Logits
from unspool.engine.branch import Branch
from unspool.engine.drafts import Guesses, Run, SideRow, Text, add_side_rows, as_runs, shortened
from unspool.engine.ending import Ending
from unspool.engine.endless import told
from unspool.engine.following import Mark, follow, may_be_bound
from unspool.engine.request import Drafter, ReadingDrafter, Request
from unspool.engine.scheduler import Scheduler, Task
from unspool.engine.state_policy import message_ends
from unspool.engine.steps import Step, explained_step, plain_step
from unspool.engine.stream import StepQueue
from unspool.errors import count
from unspool.sampling import Pick, RowInput, StageState, next_state
from unspool.sampling.picker import (
    POSITION,
    Ints,
    history_range,
    is_ordinary,
    row_numbers,
    sees_history,
)  # fmt: skip


class Sequence(Task):
    """A text on its way; lives on the engine's thread."""

    __slots__ = (
        "accepting", "draft_asked_at", "drafter", "ending", "finished", "follower",
        "forgotten", "grammar", "guard", "guesses", "history", "length", "marks",
        "prompt_length", "queue", "reader", "request", "retracted", "scheduler", "since",
        "thoughts", "token_bytes", "vocab_size",
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
        limits = request.limits
        self.scheduler, self.vocab_size, self.token_bytes = scheduler, vocab_size, token_bytes
        self.request, self.queue, self.drafter = request, queue, drafter
        self.prompt_length = len(request.prompt)
        start = [*request.prompt, *(step.token for step in request.written)]
        self.length = len(start)
        room = self.prompt_length + limits.room(self.prompt_length)
        self.history = np.empty(max(room, self.length), np.int64)
        self.history[: self.length] = start
        self.ending = Ending(limits, self.prompt_length)
        self.guard = None if request.guards is None else request.guards.start()
        self.grammar, self.thoughts = follow(request, token_bytes, vocab_size)
        self.follower = self.thoughts if self.grammar is None else self.grammar
        self.reader = drafter if isinstance(drafter, ReadingDrafter) else None
        self.guesses = Guesses()  # at what follows, being checked
        self.accepting = self.length  # how many tokens stood here when the last step was planned
        self.draft_asked_at: float | None = None  # when the drafter was asked for the draft
        self.marks: list[Mark] | None = None  # of the written tokens, where they may be needed
        if self.guard is not None or request.settings.mirostat_tau > 0:
            self.marks = []
        self.retracted = 0  # steps taken back since the last one that was sent
        self.finished = False
        for step in request.written:
            self._read(step)
        self.forgotten = limits.forgotten(self.length)  # tokens that are not in the branch
        seen = limits.in_view(start)
        branch = scheduler.tree.open(seen, cached=request.cached, adapter=adapter)
        super().__init__(branch, priority=request.priority)
        try:
            self._prepare()
        except BaseException:
            scheduler.tree.close(branch, store=False)
            raise

    def _prepare(self) -> None:
        """Set how the branch is picked for, and what is watched in it."""
        request, limits = self.request, self.request.limits
        self.cached = request.cached
        settings = request.settings
        self.sees_history = sees_history(settings)
        # A budget alone says what may come only where it closes a thought: see `by_hand`.
        drafted = self.drafter is not None
        bound = self.grammar is not None and (request.grammar is not None or drafted)
        watched = self.guard is not None or bound
        if not (watched or limits.top or limits.explain) and is_ordinary(settings):
            self.pick_floats, self.pick_ints = row_numbers(settings, limits.sample)
            self.pick_ints[POSITION] = self.forgotten  # a draw follows from the place in the text
        self._watch_for_drafter()
        self.queue.prompt_reused = min(self.branch.reused, self.first_needed)
        self.queue.report_prompt(self.queue.prompt_reused)
        self.since = perf_counter()

    def _read(self, step: Step) -> None:
        """Take a token in as if it had been written just now, but sent already."""
        self.ending.text.push(self.token_bytes(step.token))
        if self.marks is not None:
            before = self.marks[-1].state if self.marks else None
            chance = step.probability
            chance = math.exp(step.logprob) if chance is None else chance
            self._remember(next_state(self.request.settings, before, chance))
        if self.follower is not None:
            self.follower.advance(step.token)

    def begin(self) -> None:
        if self.length >= len(self.history):
            self.end(None)
        else:
            self.scheduler.add(self)

    # -- what the scheduler asks --------------------------------------------------------------

    @property
    def by_hand(self) -> bool:
        bound = self.grammar
        return self.pick_floats is None or (bound is not None and bool(bound.forced()))

    @property
    def first_needed(self) -> int:
        first = max(0, self.branch.length - max(1, self.wanted))
        if self.reader is None or not self.watch:
            return first
        try:
            return max(0, min(first, self.reader.needs(self.history[: self.length].tolist())))
        except Exception as error:
            self._without_drafter(error)
            return first

    def find_landmarks(self, page_size: int) -> Collection[int]:
        prompt = () if self.forgotten else self.request.prompt
        return {self.branch.length - 1, *message_ends(prompt, self.request.limits.end_ids)}

    def report_progress(self) -> None:
        self.queue.report_prompt(min(self.branch.computed, self.prompt_length))

    def complete(self) -> None:
        """The text is computed to its end: take what the backend picked."""
        going = True
        while going:
            row, number = self.guesses.outcome
            token, logprob = (row or self).picked[number]
            # What cannot be picked beside the text is tried again, and told, in its own row.
            going = token >= 0 and self.accept(token, logprob, None)
        self.go_on()

    def run_ahead(self) -> bool:
        if (
            self.pick_floats is None
            or (self.grammar is not None and may_be_bound(self.grammar))
            or self.drafter is not None
            or not self.cached
            or self.length + 1 >= len(self.history)
            or self.branch.length >= self.request.limits.context  # some is to be forgotten first
        ):
            return False
        self.scheduler.tree.append(self.branch, [-1 - self.pick_number])
        return True

    def side_rows(self, room: int) -> Several[Task]:
        scheduler = self.scheduler
        tree, others = scheduler.tree, len(scheduler)
        history, settings = self.history[: self.length], self.request.settings
        text = Text(self, history, self.prompt_length, settings, self.forgotten)
        # A guess is worth no page that another text may want next.
        most = max(0, min(room, tree.available - others))
        add_side_rows(self.guesses, text, tree, most, echoes=scheduler.echoes)
        return self.guesses.rows

    def penalized(self, count: int) -> tuple[Ints, list[tuple[int, int]]]:
        settings, prompt, length = self.request.settings, self.prompt_length, self.length
        draft = self.guesses.first
        if self.ahead:  # until it is picked
            self.history[length] = -1 - self.pick_number
            length += 1
        elif draft:
            self.history[length : length + len(draft)] = draft
        return self.history, [history_range(settings, prompt, length + n) for n in range(count)]

    def fail(self, error: BaseException) -> None:
        self.end(error)

    # -- the way of a token -------------------------------------------------------------------

    def row_input(self) -> RowInput:
        """What the sampling stages need to know of this text's next token."""
        forbidden = self.guard.forbidden(len(self.guard)) if self.guard is not None else ()
        return RowInput(
            self.history[: self.length],
            self.prompt_length,
            self.request.limits.sample,
            state=self.marks[-1].state if self.marks else None,
            forbidden=tuple(forbidden),
            allowed=self.grammar.mask() if self.grammar is not None else None,
        )

    def next_logits(self) -> Logits:
        """Those that the next token is picked from, [1, V]."""
        row, number = self.guesses.outcome
        before = 0
        for logits in (row or self).logits:  # of each chunk
            if number < before + len(logits):
                return logits[number - before : number - before + 1]
            before += len(logits)
        raise AssertionError("no logits are there to pick from")

    def accept(self, token: int, logprob: float, pick: Pick | None) -> bool:
        """Take a picked token; True if the draft had guessed it, so that more can be picked."""
        drafted, right = None, False
        guesses = self.guesses
        if guesses.guessed():
            right = guesses.follow(token)
            drafted = "accepted" if right else "rejected"
            self.queue.accepted += right and self.draft_asked_at is not None
        self.history[self.length] = token
        self.length += 1
        if self.follower is not None:
            self.follower.advance(token)
        if not self._keep(token, logprob, pick, drafted):
            return False
        return right

    def go_on(self) -> None:
        """Put what was picked behind the branch, with a new draft, to be computed next."""
        if self.finished:
            return
        tree, guesses = self.scheduler.tree, self.guesses
        if self.watch:
            self._show_drafter()
        if self.draft_asked_at is not None:
            self._tell_drafter()
        if guesses.rows:
            self._choose_branch()
        branch = self.branch
        if self.ahead:  # its place is taken already
            branch.tail[-1] = int(self.history[self.length - 1])
            self.ahead = False
        else:
            if self.request.limits.forgotten(self.length) != self.forgotten:
                branch = self._move_view()
            else:
                # All but the last token of the history is in the branch, unless drafts or guards
                # erred. The last one is always run, also when a guard went back to it.
                known = min(self.accepting + guesses.checked, self.length - 1)
                if known - self.forgotten < branch.length:  # a wrong guess is not worth storing
                    tree.rewind(branch, known - self.forgotten, store=not guesses.first)
                tree.append(branch, self.history[known : self.length].tolist())
            self.guesses = Guesses()
            if self.grammar is not None or self.drafter is not None:
                self.guesses = Guesses(self._new_draft())
                tree.append(branch, self.guesses.first)
        self._watch_for_drafter()
        self.accepting = self.length
        self.wanted = len(self.guesses.first) + 1
        self.splits = len(self.guesses.runs) > 1
        self.decoding = True
        self.picked.clear()
        self.logits.clear()
        if not self.cached:  # as if nothing had ever been computed of it
            tree.preempt(branch)

    # -- a text longer than the context (`endless.py`) ------------------------------------------

    def _move_view(self) -> Branch:
        """Forget some more (or, taken back, less); what is left is read again, as a new branch."""
        limits, tree, adapter = self.request.limits, self.scheduler.tree, self.branch.adapter
        self.forgotten = limits.forgotten(self.length)
        if self.pick_floats is not None:
            self.pick_ints[POSITION] = self.forgotten
        seen = limits.in_view(self.history[: self.length].tolist())
        self.scheduler.change_branch(self, tree.open(seen, cached=self.cached, adapter=adapter))
        return self.branch

    # -- drafts -------------------------------------------------------------------------------

    def _new_draft(self) -> list[Run]:
        until_jump = self.request.limits.context - self.length + self.forgotten
        room = min(len(self.history) - self.length - 1, until_jump)
        if room <= 0:
            return []
        if self.grammar is not None:
            forced: list[int] = self.grammar.forced()[:room]
            if forced:
                return [Run(forced)]
        if self.drafter is None:
            return []
        self.draft_asked_at = perf_counter()
        try:
            tokens = self.history[: self.length].tolist()
            runs = as_runs(self.drafter.propose(tokens, room))
            runs = shortened(runs, [self._sound(run, room) for run in runs])
        except Exception as error:
            self._without_drafter(error)
            return []
        self.queue.drafted += sum(len(run.tokens) for run in runs)
        return runs

    def _sound(self, run: Run, room: int) -> int:
        """How much of a guess can be run, and can matter: nothing follows an end token."""
        size, ends, kept = self.vocab_size, self.request.limits.end_ids, 0
        before = run.before()
        if any(token in ends for token in before):
            return 0
        run.tokens = [int(token) for token in run.tokens]
        for token in run.tokens[: max(0, room - len(before))]:
            if not 0 <= token < size:
                break
            kept += 1
            if token in ends:
                break
        if self.grammar is not None and kept:
            whole = [*before, *run.tokens[:kept]]
            kept = max(0, self.grammar.accepts(whole) - len(before))
        return kept

    def _watch_for_drafter(self) -> None:
        """Which inner vectors the next step is to give."""
        try:
            self.watch = self.reader.reads if self.reader is not None else ()
        except Exception as error:
            self.watch = ()
            self._without_drafter(error)

    def _show_drafter(self) -> None:
        """Give the drafter the inner vectors of what stands in the text now, row by row."""
        rows = [run.row or self for run in self.guesses.path]
        try:
            for inside in (inside for row in rows for inside in row.inside):
                if self.reader is not None and inside.residuals is not None:
                    self.reader.see(inside.first, inside.residuals)
        except Exception as error:
            self._without_drafter(error)
        self.inside.clear()

    def _choose_branch(self) -> None:
        """Go on with the branch of the last guess that was right; the others are not needed."""
        chosen = self.guesses.run.row
        for row in self.guesses.rows:
            if row is not chosen:
                self.scheduler.tree.close(row.branch, store=False)
        if isinstance(chosen, SideRow):
            self.scheduler.change_branch(self, chosen.branch)
            self.scheduler.tree.advance(self.branch, chosen.until)

    def _tell_drafter(self) -> None:
        """How the round went that the drafter was asked for."""
        asked_at, self.draft_asked_at = self.draft_asked_at, None
        if self.drafter is None or asked_at is None:
            return
        try:
            count, right = self.guesses.count, self.guesses.checked
            note = self.drafter.learn(count, right, perf_counter() - asked_at)
        except Exception as error:
            self._without_drafter(error)
            return
        if note:
            self.queue.notes.append(note)

    def _without_drafter(self, error: Exception) -> None:
        self.drafter, self.reader, self.draft_asked_at = None, None, None
        self.queue.notes.append(f"drafting stopped: the drafter failed ({error!r})")

    # -- what leaves, and what is taken back --------------------------------------------------

    def _keep(self, token: int, logprob: float, pick: Pick | None, drafted: str | None) -> bool:
        """Send the step; or take back what the guards object to. True if the text goes on."""
        piece = self.token_bytes(token)
        must_end = self.grammar is not None and self.grammar.must_end
        before = self.ending.copy() if self.guard is not None else self.ending
        begun = self.ending.text.half
        thought = self.thoughts is not None and self.thoughts.is_thought
        shown, finish = self.ending.push(token, piece, self.length, must_end)
        if self.guard is not None:
            assert pick is not None
            verdict = self.guard.push(token, piece, logprob, pick.entropy)
            if finish and verdict.kind == "keep":
                verdict = self.guard.finish()
            if verdict.kind == "rewind":
                assert verdict.to is not None
                self.ending = before
                self._take_back(verdict.to + len(self.request.written), str(verdict.reason))
                return False
            if verdict.kind == "stop":
                finish = "guard"
                self.queue.notes.append(f"stopped: {verdict.reason}")
        if finish:
            shown += self.ending.finish()
            self.queue.stopped_by = self.ending.stopped_by
        now = perf_counter()
        seconds, self.since = now - self.since, now
        position, retracted = self.length - 1, self.retracted
        if pick is None:
            step = plain_step(
                token, piece, shown, logprob, position, seconds, finish, drafted, begun, thought
            )
        else:
            if self.marks is not None:
                self._remember(pick.state)
            step = explained_step(
                pick, position, shown, self.token_bytes, seconds, finish, drafted, retracted,
                begun=begun, thought=thought,
            )  # fmt: skip
            self.retracted = 0
        self.queue.put(step)
        if finish:
            self.end(None)
            return False
        return True

    def _remember(self, state: StageState | None) -> None:
        """What is needed to come back to just behind the token."""
        assert self.marks is not None
        ending = self.ending.copy() if self.guard is not None else None
        self.marks.append(Mark(state, ending))

    def _take_back(self, to: int, reason: str) -> None:
        """Drop the written tokens from number `to` on; the last one was not sent yet."""
        assert self.marks is not None
        taken = self.length - self.prompt_length - to
        self.queue.notes.append(f"took {count(taken, 'token')} back: {reason}")
        self.retracted += len(self.marks) - to
        if self.follower is not None:
            self.follower.rewind(taken)
        del self.marks[to:]
        self.length = self.prompt_length + to
        before = self.marks[-1].ending if self.marks else None
        self.ending = before.copy() if before else Ending(self.request.limits, self.prompt_length)

    # -- the end ------------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        if self.finished:
            return
        self.finished = True
        limits = self.request.limits
        if self.forgotten and limits.endless is not None:
            self.queue.notes.append(told(self.length, limits.context, limits.endless))
        try:
            self.scheduler.remove(self)
            self.scheduler.tree.close(self.branch, store=error is None)
            for row in self.guesses.rows:
                self.scheduler.tree.close(row.branch, store=False)
        finally:  # whatever happens, nobody waits for more
            self.queue.end(error)
