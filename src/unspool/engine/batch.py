"""From planned rows to a `StepBatch`, and from its result back to the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unspool.backends.step import Inside, Look, StepBatch, StepResult, TableUpdates
from unspool.engine.scheduler import Task
from unspool.engine.tree import Tree
from unspool.sampling.picker import HISTORY_END, HISTORY_START, POSITION, Ints, PickRows

_NO_HISTORY = np.empty(0, np.int64)
_NO_COPIES = np.empty((0, 2), np.int64)
_NO_UPDATES = TableUpdates()


@dataclass(slots=True)
class Share:
    """One row's part of a step."""

    task: Task
    first: int  # it computes the positions from here ...
    until: int  # ... to here
    outcomes: int  # the last so many of them have an outcome
    places: list[int]  # positions that are looked at


def build(tree: Tree, rows: list[Task]) -> tuple[StepBatch, list[Share]]:
    """The step that computes each task's branch up to `task.until`."""
    size, shares = tree.page_size, list[Share]()
    tokens: list[int] = []
    starts, firsts, slots = [0], list[int](), list[int]()
    table: list[tuple[int, int, int]] = []
    sampled, logits, seen, deep = list[int](), list[int](), list[int](), list[int]()
    picks = _Picks()
    for row, task in enumerate(rows):
        branch, first, until = task.branch, task.first, task.until
        start, at = branch.start, starts[row]
        tokens += branch.tail[first - start : until - start]
        firsts.append(first)
        starts.append(at + until - first)
        slots.append(branch.slot if branch.slot >= 0 else tree.slot_of(branch))
        column = branch.tabled
        if column * size < until:
            for page in branch.pages_from(column):
                table.append((branch.slot, column, page))
                column += 1
            branch.tabled = column
        begin = max(first, branch.length - task.wanted)
        outcomes = max(0, until - begin)
        if outcomes:
            numbers = range(begin - first + at, until - first + at)
            if task.pick_floats is None:
                logits += numbers
            else:
                sampled += numbers
                picks.add(task, begin + 1, outcomes)
        places: list[int] = []
        if task.look:
            places = [p for p in sorted(task.look) if first <= p < until]
            seen += [p - first + at for p in places]
            deep += [p - first + at for p in places] if task.deep else []
        task.flights += 1
        task.row = row
        shares.append(Share(task, first, until, outcomes, places))
    begins = np.array(starts)
    positions = np.array(firsts)
    if len(tokens) > len(rows):  # a row's positions follow one another
        counts = np.diff(begins)
        positions = np.arange(len(tokens)) + np.repeat(positions - begins[:-1], counts)
    copies, tree.copies = tree.copies, []
    return StepBatch(
        tokens=np.array(tokens),
        positions=positions,
        visible_end=_visible_end(rows, positions, starts),
        starts=begins,
        slots=np.array(slots),
        updates=TableUpdates(*np.array(table).T) if table else _NO_UPDATES,
        copies=np.array(copies) if copies else _NO_COPIES,
        sampled=np.array(sampled, np.int64),
        pick=picks.rows() if sampled else None,
        logits=np.array(logits, np.int64),
        look=_look(seen, deep),
    ), shares


def _visible_end(rows: list[Task], positions: Ints, starts: list[int]) -> Ints:
    """Each token sees those before it and itself; provisional ones see each other too."""
    ends: Ints = positions + 1
    for row, task in enumerate(rows):
        first = task.branch.provisional
        if first is not None:
            mine = slice(starts[row], starts[row + 1])
            ends[mine] = np.where(positions[mine] >= first, task.until, ends[mine])
    return ends


def _look(seen: list[int], deep: list[int]) -> Look | None:
    if not seen:
        return None
    whole = np.array(deep, np.int64)
    return Look(residuals=np.array(seen), attention=whole, parts=whole)


class _Picks:
    """How the sampled rows are to be picked from."""

    def __init__(self) -> None:
        self.floats: list[list[float]] = []
        self.ints: list[list[int]] = []
        self.histories: list[Ints] = []
        self.length = 0

    def add(self, task: Task, position: int, count: int) -> None:
        """Tokens of one text, to be picked for so many positions from this one on."""
        floats = task.pick_floats
        assert floats is not None
        seen = task.penalized()
        base = 0
        if seen is not None:
            text, start, end = seen
            base, last = self.length - start, end + count - 1
            self.histories.append(text[start:last])
            self.length += last - start
        for number in range(count):
            ints = task.pick_ints.copy()
            ints[POSITION] = position + number
            if seen is not None:
                ints[HISTORY_START], ints[HISTORY_END] = base + start, base + end + number
            self.floats.append(floats)
            self.ints.append(ints)

    def rows(self) -> PickRows:
        history = np.concatenate(self.histories) if self.histories else _NO_HISTORY
        return PickRows(np.array(self.floats), np.array(self.ints), history)


def share_out(
    tree: Tree, shares: list[Share], result: StepResult
) -> list[tuple[Task, Exception | None]]:
    """Say of each branch how far it is now, and give each task its part of the result. Gives back
    those whose branch is computed to its end, and what went wrong with them, if anything did."""
    picks = list(zip(result.tokens.tolist(), result.logprobs.tolist(), strict=True))
    at = picked = seen = seen_deep = 0
    complete: list[tuple[Task, Exception | None]] = []
    for share in shares:
        task, count, error = share.task, share.outcomes, None
        task.flights -= 1
        if count and task.pick_floats is not None:
            if result.failures:
                error = _failure(result, range(picked, picked + count))
            task.picked += picks[picked : picked + count]
            picked += count
        elif count:
            task.logits.append(result.logits[at : at + count])
            at += count
        if share.places and result.inside is not None:
            deep = len(share.places) if task.deep else 0
            task.inside.append(_part(result.inside, seen, len(share.places), seen_deep, deep))
            seen += len(share.places)
            seen_deep += deep
        if not task.queued:
            continue  # it was cancelled while the step was running
        tree.advance(task.branch, share.until)
        if error is not None or task.branch.computed >= task.branch.length - task.ahead:
            complete.append((task, error))
    return complete


def _failure(result: StepResult, numbers: range) -> Exception | None:
    return next((error for n, error in result.failures.items() if n in numbers), None)


def _part(inside: Inside, start: int, count: int, deep_start: int, deep_count: int) -> Inside:
    """The share of one row in what was seen."""
    part, deep = slice(start, start + count), slice(deep_start, deep_start + deep_count)
    vectors = None if inside.residuals is None else inside.residuals[:, part]
    parts = None if inside.parts is None else inside.parts[:, :, deep]
    return Inside(vectors, inside.attention[deep], parts)
