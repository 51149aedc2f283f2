"""Texts that write by themselves: pick, append, and round again, many at a time.

The same loop as `plain.py`, turned inside out: the engine's thread runs a batch, then every text
that got its logits picks its next token, all in one pass through the sampling stages. A text may
bring a draft of what comes next; the tokens of the draft are checked in one run, and those that
would have been picked anyway are kept. Because the draw of a position does not depend on how the
logits were computed, a drafted text is the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from unspool.engine.engine import Engine
from unspool.engine.plain import as_step
from unspool.engine.request import Drafter, Request
from unspool.engine.scheduler import Task
from unspool.engine.stream import StepStream
from unspool.engine.tree import Branch
from unspool.errors import BusyError
from unspool.sampling import (
    BadLogitsError,
    Chain,
    NoCandidateError,
    Pick,
    RowInput,
    SamplingSettings,
    StageState,
    next_state,
)
from unspool.text.tokenizer.stream import TextStream


class Writers:
    """All texts being written on one engine."""

    def __init__(
        self, engine: Engine, token_bytes: Callable[[int], bytes], *, most_waiting: int = 1024
    ) -> None:
        self.engine, self.token_bytes = engine, token_bytes
        self.most_waiting = most_waiting
        self.waiting: set[_Writing] = set()  # those that have no token yet
        self._ready: list[tuple[_Writing, Any]] = []  # those with logits to pick from
        self._chains: dict[tuple[int, ...], Chain] = {}
        engine.after_run.append(self._pick_all)

    def submit(self, request: Request) -> StepStream:
        """Start writing; steps come as they are made."""
        limits = request.limits
        longest = min(len(request.prompt) + limits.max_tokens, limits.context)
        self.engine.scheduler.check_fits(longest)
        if len(self.waiting) >= self.most_waiting:
            raise BusyError(
                f"{len(self.waiting)} requests are waiting already, as many as may; try later"
            )
        writing = _Writing(self, request)
        self.waiting.add(writing)
        self.engine.tell(writing.begin)
        return writing.out

    def ready(self, writing: _Writing, logits: Any) -> None:
        self.waiting.discard(writing)
        self._ready.append((writing, logits))

    def _pick_all(self) -> None:
        """One token for every text that is ready; with drafts, as many as they got right."""
        going, self._ready = self._ready, []
        moved = {id(writing): writing for writing, _ in going}
        while going:
            further = []
            for picked, (writing, logits) in self._picks(going):
                if picked is not None and writing.accept(picked) and len(logits) > 1:
                    further.append((writing, logits[1:]))
            going = further
        for writing in moved.values():
            writing.go_on()

    def _picks(
        self, going: list[tuple[_Writing, Any]]
    ) -> list[tuple[Pick | None, tuple[_Writing, Any]]]:
        """A pick for each text; a text that cannot have one fails alone."""
        found: list[tuple[Pick | None, tuple[_Writing, Any]]] = []
        groups: dict[tuple[int, bool], list[tuple[_Writing, Any]]] = {}
        for entry in going:
            limits = entry[0].request.limits
            groups.setdefault((limits.top, limits.explain), []).append(entry)
        for (top, explain), members in groups.items():
            inputs = [(writing.row_or_none(), (writing, logits)) for writing, logits in members]
            rows = [row for row, _ in inputs if row is not None]
            members = [member for row, member in inputs if row is not None]
            while members:
                chain = self._chain([writing.request.settings for writing, _ in members])
                logits = _stacked([rows_of[0] for _, rows_of in members])
                try:
                    picks = chain.pick(logits, rows, top=top, explain=explain)
                except (BadLogitsError, NoCandidateError) as error:
                    for number in error.rows:
                        members[number][0].fail(error)
                    members = [m for n, m in enumerate(members) if n not in error.rows]
                    rows = [row for n, row in enumerate(rows) if n not in error.rows]
                    continue
                except Exception as error:  # a fault without a name: nobody here can go on
                    for writing, _ in members:
                        writing.fail(error)
                    break
                found += zip(picks, members, strict=True)
                break
        return found

    def _chain(self, settings: list[SamplingSettings]) -> Chain:
        key = tuple(map(id, settings))
        if key not in self._chains:
            if len(self._chains) > 64:
                self._chains.clear()
            self._chains[key] = Chain(settings)
        return self._chains[key]


def _stacked(rows: list[Any]) -> Any:
    if isinstance(rows[0], np.ndarray):
        return rows[0][None] if len(rows) == 1 else np.stack(rows)
    import torch

    return torch.stack(rows)


@dataclass(slots=True)
class _Token:
    """What must be known of a written token to go back to just behind it."""

    logprob: float
    state: StageState | None
    text: TextStream | None  # a copy, kept only where going back may be needed


@dataclass(eq=False, slots=True)
class _Writing:
    """One text on its way; lives on the engine's thread."""

    writers: Writers
    request: Request
    out: StepStream = field(init=False)
    branch: Branch | None = None
    task: Task | None = None
    history: np.ndarray[Any, np.dtype[np.int64]] = field(init=False)
    length: int = 0  # of the history
    drafter: Drafter | None = None
    asked: float | None = None  # when the drafter was asked for the draft; None: it was not
    draft: list[int] = field(default_factory=list)
    checked: int = 0  # tokens of the draft that proved right
    written: list[_Token] = field(default_factory=list)
    text: TextStream = field(init=False)
    guard: Any = None
    grammar: Any = None
    retracted: int = 0  # steps taken back since the last one that was sent
    just_kept: bool = True  # whether the last token picked was kept
    finished: bool = False
    since: float = 0.0

    def __post_init__(self) -> None:
        request, limits = self.request, self.request.limits
        engine = self.writers.engine
        self.out = StepStream(lambda: engine.tell(self.cancel))
        start = [*request.prompt, *(step.token for step in request.written)]
        room = min(limits.context, len(request.prompt) + limits.max_tokens)
        self.history = np.empty(max(room, len(start)), np.int64)
        self.history[: len(start)] = start
        self.length = len(start)
        self.text = TextStream(limits.stop)
        made = request.drafter
        self.drafter = made(request) if callable(made) else made
        self.guard = request.guards.start() if request.guards is not None else None
        self.grammar = request.grammar.start() if request.grammar is not None else None
        state: StageState | None = None
        for step in request.written:  # as if they had been written just now, but sent already
            self.text.push(self.writers.token_bytes(step.token))
            state = next_state(request.settings, state, step.probability)
            self._remember(step.logprob, state)
            if self.grammar is not None:
                self.grammar.advance(step.token)
        self.since = perf_counter()

    # -- the way of a token ------------------------------------------------------------------

    def begin(self) -> None:
        if self.finished:
            return
        if self.length >= len(self.history):
            self.end(None)
            return
        try:
            self.branch = self.writers.engine.tree.open(self.history[: self.length].tolist())
            if self.request.cached:
                self.out.prompt_reused = self.branch.reused
            self.out.missed_from = self.branch.missed_from
            self._run(wanted=1)
        except BaseException as error:
            self.fail(error)

    def _run(self, wanted: int) -> None:
        assert self.branch is not None
        if self.task is None:
            self.task = Task(
                self.branch, wanted, self._computed, self.fail, priority=self.request.priority
            )
        self.task.wanted = wanted
        self.task.rows.clear()
        if not self.request.cached:  # as if nothing had ever been computed of it
            self.writers.engine.tree.put_aside(self.branch)
            self.task.started = False
        self.writers.engine.scheduler.add(self.task)

    def _computed(self, logits: Any, inside: Any) -> None:
        if not self.finished:
            self.writers.ready(self, logits)

    def row_or_none(self) -> RowInput | None:
        """`row`; None if the text cannot go on, and has failed."""
        try:
            return self.row()
        except Exception as error:  # a grammar that grew beyond its limits, say
            self.fail(error)
            return None

    def row(self) -> RowInput:
        """What the sampling stages need to know of this text's next token."""
        return RowInput(
            self.history[: self.length],
            len(self.request.prompt),
            self.request.limits.sample,
            state=self.written[-1].state if self.written else None,
            forbidden=tuple(self.guard.forbidden(len(self.guard)))
            if self.guard is not None
            else (),
            allowed=self.grammar.mask() if self.grammar is not None else None,
        )

    def accept(self, pick: Pick) -> bool:
        """Take a picked token; True if the draft had guessed it, so that more can be picked."""
        guessed = self.checked < len(self.draft) and self.draft[self.checked] == pick.token
        drafted = None
        if self.checked < len(self.draft):
            drafted = "accepted" if guessed else "rejected"
            self.out.accepted += guessed and self.asked is not None
        self.history[self.length] = pick.token
        self.length += 1
        try:
            if self.grammar is not None:
                self.grammar.advance(pick.token)
            self._take(pick, drafted)
        except BaseException as error:  # a caller's predicate, say: this text fails, alone
            self.fail(error)
        if self.finished or not self.just_kept:
            return False
        self.checked += guessed
        return guessed

    def go_on(self) -> None:
        """Put what was picked behind the branch, with a new draft, and have it computed."""
        if self.finished or self.branch is None:
            return
        tree = self.writers.engine.tree
        self._tell_drafter()
        known = self.branch.tokens
        # All but the last token of the history is in the branch, unless drafts or guards erred.
        # The last one is always run, also when a guard went back to it: its logits are wanted.
        same = min(len(known), self.length - 1)
        start = max(0, same - len(self.draft) - 1)
        while start < same and known[start] == self.history[start]:
            start += 1
        if start < len(known):
            if self.draft:  # a wrong guess is not worth storing, nor the copy of a page it costs
                self.branch.computed = min(self.branch.computed, start)
            tree.rewind(self.branch, start)
        known_from = len(self.request.prompt)
        logprobs = [
            self.written[place - known_from].logprob if place >= known_from else None
            for place in range(start, self.length)
        ]
        tree.append(self.branch, self.history[start : self.length].tolist(), logprobs)
        self.draft, self.checked = self._new_draft(self.branch.tokens), 0
        tree.append(self.branch, self.draft)
        try:
            self._run(wanted=len(self.draft) + 1)
        except BaseException as error:
            self.fail(error)

    def _new_draft(self, tokens: list[int]) -> list[int]:
        room = len(self.history) - self.length - 1
        if room <= 0:
            return []
        if self.grammar is not None:
            forced: list[int] = self.grammar.forced()[:room]
            if forced:
                return forced
        if self.drafter is None:
            return []
        self.asked = perf_counter()
        try:
            draft = self._sound(self.drafter.propose(tokens, room)[:room])
        except Exception as error:
            self._without_drafter(error)
            return []
        if self.grammar is not None and draft:
            draft = draft[: self.grammar.accepts(draft)]
        self.out.drafted += len(draft)
        return draft

    def _sound(self, proposed: Sequence[int]) -> list[int]:
        """A guess as far as it can be run, and as it can matter: nothing follows an end token."""
        size, draft = self.writers.engine.backend.vocab_size, []
        for token in map(int, proposed):
            if not 0 <= token < size:
                break
            draft.append(token)
            if token in self.request.limits.end_ids:
                break
        return draft

    def _tell_drafter(self) -> None:
        """How the round went that the drafter was asked for."""
        asked, self.asked = self.asked, None
        if self.drafter is None or asked is None:
            return
        try:
            note = self.drafter.learn(len(self.draft), self.checked, perf_counter() - asked)
        except Exception as error:
            self._without_drafter(error)
            return
        if note:
            self.out.notes.append(note)

    def _without_drafter(self, error: Exception) -> None:
        self.drafter, self.asked = None, None
        self.out.notes.append(f"drafting stopped: the drafter failed ({error!r})")

    # -- what leaves, and what is taken back -------------------------------------------------

    def _take(self, pick: Pick, drafted: str | None) -> None:
        """Ask the guards; then send the step, or take back what they object to."""
        limits, count = self.request.limits, self.length - len(self.request.prompt)
        piece = self.writers.token_bytes(pick.token)
        verdict = None
        if self.guard is not None:
            verdict = self.guard.push(pick.token, piece, pick.logprob, pick.entropy)
        ended = pick.token in limits.end_ids
        before = self.text.copy() if self.guard is not None else self.text
        shown = self.text.push(b"" if ended else piece)
        finish = None
        if (
            ended
            or self.text.stopped is not None
            or (self.grammar is not None and self.grammar.must_end)
        ):
            finish = "stop"
        elif count == limits.max_tokens:
            finish = "length"
        elif self.length == limits.context:
            finish = "context"
        if self.guard is not None and finish and verdict and verdict.kind == "keep":
            verdict = self.guard.finish()
        self.just_kept = verdict is None or verdict.kind != "rewind"
        if verdict and verdict.kind == "rewind":
            self.text = before
            self._take_back(verdict.to + len(self.request.written), verdict.reason)
            return
        if verdict and verdict.kind == "stop":
            finish = "guard"
            self.out.notes.append(f"stopped: {verdict.reason}")
        if finish:
            shown += self.text.finish()
            self.out.stopped_by = self.text.stopped
        self._remember(pick.logprob, pick.state)
        now = perf_counter()
        step = as_step(
            pick, self.length - 1, shown, self.writers.token_bytes, now - self.since, finish
        )
        self.since = now
        if drafted is not None or self.retracted:
            step = replace(step, draft=drafted, retracts=self.retracted)
        self.out.put(step)
        self.retracted = 0
        if finish:
            self.end(None)

    def _remember(self, logprob: float, state: StageState | None) -> None:
        """What is needed to come back to just behind the token; only guards go back."""
        text = self.text.copy() if self.guard is not None else None
        self.written.append(_Token(logprob, state, text))

    def _take_back(self, to: int, reason: str) -> None:
        """Forget the written tokens from number `to` on; the last one was not sent yet."""
        taken = self.length - len(self.request.prompt) - to
        self.out.notes.append(f"took {taken} tokens back: {reason}")
        self.retracted += len(self.written) - to
        if self.grammar is not None:
            self.grammar.rewind(taken)
        del self.written[to:]
        self.length = len(self.request.prompt) + to
        before = self.written[-1].text if self.written else None
        self.text = before.copy() if before else TextStream(self.request.limits.stop)

    # -- the end -----------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        if self.finished:
            return
        self.finished = True
        self.writers.waiting.discard(self)
        engine = self.writers.engine
        if self.task is not None and self.task in engine.scheduler.tasks:
            engine.scheduler.remove(self.task)
        if self.branch is not None:
            engine.tree.close(self.branch)
        self.out.end(error)

    def fail(self, error: BaseException) -> None:
        self.end(error)

    def cancel(self) -> None:
        self.end(None)
