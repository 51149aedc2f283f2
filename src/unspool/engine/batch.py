"""From planned rows to a `StepBatch`, and from its result back to the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unspool.backends.step import Inside, Look, StepBatch, StepResult, TableUpdates
from unspool.engine.branch import Branch
from unspool.engine.drafts import SideRow
from unspool.engine.scheduler import Task
from unspool.engine.tree import Tree
from unspool.sampling.picker import HISTORY_END, HISTORY_START, POSITION, Ints, PickRows

_NOTHING = np.empty(0, np.int64)
_ONE = np.ones(1, np.int64)  # an array is added in half the time that a number takes
_NO_COPIES = np.empty((0, 2), np.int64)
_NO_UPDATES = TableUpdates()


@dataclass(slots=True)
class Share:
    """One row's part of a step."""

    task: Task
    until: int  # it computes the positions up to here
    outcomes: int  # the last so many of them have an outcome
    places: list[int]  # positions that are looked at


class BatchBuilder:
    """Makes the steps of one tree. The numbers that a text is picked with stay the same from token
    to token, so they are kept, by its line of the block table."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._floats, self._ints = np.zeros((8, 6)), np.zeros((8, 6), np.int64)
        self._numbers = np.arange(8)

    def build(self, rows: list[Task]) -> tuple[StepBatch, list[Share]]:
        """The step that computes each task's branch up to `task.until`."""
        tree, size = self._tree, self._tree.page_size
        # Written so, and not as list[int](), which takes ten times as long.
        shares: list[Share] = []
        tokens: list[int] = []
        starts: list[int] = [0]
        firsts: list[int] = []
        slots: list[int] = []
        table: list[tuple[int, int, int]] = []
        sampled: list[int] = []
        lines: list[int] = []
        logits: list[int] = []
        seen: list[int] = []
        deep: list[int] = []
        seeing_ahead: list[int] = []
        watched: set[int] | None = set()  # vectors that somebody wants to see; None: all
        sides: list[tuple[int, SideRow]] = []
        adapters: list[int] = []
        histories: _Histories | None = None
        for row, task in enumerate(rows):
            branch, first, until = task.branch, task.first, task.until
            start, at = branch.start, starts[row]
            tokens += branch.tail[first - start : until - start]
            end = at + until - first
            firsts.append(first)
            starts.append(end)
            slot = branch.slot if branch.slot >= 0 else self._enter(task)
            slots.append(slot)
            adapters.append(branch.adapter if branch.twin is None else _adapter(branch, first))
            column = branch.tabled
            if column * size < until:
                for page in branch.pages_from(column):
                    table.append((slot, column, page))
                    column += 1
                branch.tabled = column
            outcomes = max(0, until - max(first, branch.length - task.wanted))
            if outcomes:
                if task.by_hand:
                    logits += range(end - outcomes, end)
                else:
                    if task.sees_history:
                        histories = histories or _Histories()
                        histories.add(task, len(sampled), outcomes)
                    task.pick_number = len(sampled)
                    sampled += range(end - outcomes, end)
                    lines += (slot,) * outcomes
            places: list[int] = []
            if task.look:
                places = [p for p in sorted(task.look) if first <= p < until]
                seen += [p - first + at for p in places]
                deep += [p - first + at for p in places] if task.deep else []
                watched = None
            elif task.watch:
                places = list(range(first, until))
                seen += range(at, end)
                if watched is not None:
                    watched.update(task.watch)
            if isinstance(task, SideRow) and task.sources:
                sides.append((slot, task))
            if branch.provisional is not None or branch.block:
                seeing_ahead.append(row)
            task.flights += 1
            shares.append(Share(task, until, outcomes, places))
        count = len(tokens)
        positions, of_rows = np.array(firsts), np.array(slots)
        if count == len(rows):  # a next token each: most steps are so
            begins = self._first_numbers(count + 1)
        else:  # a row's positions follow one another
            begins = np.array(starts)
            counts = np.diff(begins)
            positions = np.arange(count) + np.repeat(positions - begins[:-1], counts)
        behind = positions + _ONE
        visible_end = behind.copy() if seeing_ahead else behind
        for row in seeing_ahead:
            mine = slice(starts[row], starts[row + 1])
            visible_end[mine] = _sight(rows[row].branch, positions[mine])
        picked_after, pick = _NOTHING, None
        if sampled:
            if len(sampled) == len(rows) == count:
                picked_after, of_picks, next_places = self._first_numbers(count), of_rows, behind
            else:  # `take` is twice as quick as an index where there are few
                picked_after, of_picks = np.array(sampled), np.array(lines)
                next_places = behind.take(picked_after)
            ints = self._ints.take(of_picks, 0)
            ints[:, POSITION] += next_places  # behind what is out of view
            history = histories.put(ints) if histories else _NOTHING
            pick = PickRows(self._floats.take(of_picks, 0), ints, history)
        states = captures = _NO_COPIES
        if tree.states is not None:
            states, captures = tree.states.rows([task.branch for task in rows], firsts, starts)
        copies = tree.take_copies() if tree.copies else None
        return StepBatch(
            tokens=np.array(tokens),
            positions=positions,
            visible_end=visible_end,
            starts=begins,
            slots=of_rows,
            updates=TableUpdates(*np.array(table).T) if table else _NO_UPDATES,
            copies=np.array(copies) if copies else _NO_COPIES,
            sampled=picked_after,
            pick=pick,
            logits=np.array(logits) if logits else _NOTHING,
            look=_look(seen, deep, watched) if seen else None,
            adapters=np.array(adapters) if any(adapters) else _NOTHING,
            echoes=_echoes(rows, starts, sides) if sides else _NO_COPIES,
            states=states,
            captures=captures,
        ), shares

    def _first_numbers(self, count: int) -> Ints:
        """0, 1, 2, ...: nobody changes what is in a step, so they are made once."""
        if count > len(self._numbers):
            self._numbers = np.arange(2 * count)
        return self._numbers[:count]

    def _enter(self, task: Task) -> int:
        """A task's first step: its line of the block table, and of the numbers for its picks."""
        slot = self._tree.slot_of(task.branch)
        if task.pick_floats is not None:
            while slot >= len(self._floats):
                self._floats = np.concatenate((self._floats, self._floats))
                self._ints = np.concatenate((self._ints, self._ints))
            self._floats[slot], self._ints[slot] = task.pick_floats, task.pick_ints
        return slot


def _adapter(branch: Branch, first: int) -> int:
    """What a row from this position on is computed with: its provisional end has its own."""
    canvas = branch.provisional is not None and first >= branch.provisional
    return branch.twin if canvas and branch.twin is not None else branch.adapter


def _sight(branch: Branch, positions: Ints) -> Ints:
    """How far tokens see that do not only look back: to the end of their block, or, of a
    provisional end, to its end."""
    if branch.block:
        return np.minimum((positions // branch.block + 1) * branch.block, branch.length)
    return np.where(positions >= (branch.provisional or 0), branch.length, positions + 1)


def _look(seen: list[int], deep: list[int], layers: set[int] | None) -> Look:
    whole = np.array(deep, np.int64)
    which = None if layers is None else tuple(sorted(layers))
    return Look(residuals=np.array(seen), layers=which, attention=whole, parts=whole)


def _echoes(rows: list[Task], starts: list[int], sides: list[tuple[int, SideRow]]) -> Ints:
    """Which tokens are written into which lines besides their own."""
    begins = {task: start - task.first for task, start in zip(rows, starts, strict=False)}
    found = [
        (begins[source] + position, slot)
        for slot, side in sides
        for source, positions in side.sources
        for position in positions
    ]
    return np.array(sorted(found))


class _Histories:
    """What the penalties of a step's picks see."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._length = 0
        self._ranges: list[tuple[int, int, int]] = []  # number of the pick, start, end

    def add(self, task: Task, number: int, count: int) -> None:
        """For so many picks of one text, the first of them with this number."""
        text, ranges = task.penalized(count)
        first, last = ranges[0][0], ranges[-1][1]
        moved = self._length - first
        for more, (start, end) in enumerate(ranges):
            self._ranges.append((number + more, start + moved, end + moved))
        self._parts.append(text[first:last])
        self._length += last - first

    def put(self, ints: Ints) -> Ints:
        """Write into the picks' numbers where their histories are; all of them in one array."""
        numbers, starts, ends = np.array(self._ranges).T
        ints[numbers, HISTORY_START], ints[numbers, HISTORY_END] = starts, ends
        return np.concatenate(self._parts)


def share_out(
    tree: Tree, shares: list[Share], result: StepResult, layers: tuple[int, ...] | None = None
) -> list[tuple[Task, Exception | None]]:
    """Say of each branch how far it is now, and give each task its part of the result. Gives back
    those whose branch is computed to its end, and what went wrong with them, if anything did."""
    picks = list(zip(result.tokens.tolist(), result.logprobs.tolist(), strict=True))
    at = picked = seen = seen_deep = 0
    complete: list[tuple[Task, Exception | None]] = []
    for share in shares:
        task, count, error = share.task, share.outcomes, None
        task.flights -= 1
        if count and not task.by_hand:
            if result.failures:
                error = _failure(result, range(picked, picked + count))
            task.picked += picks[picked : picked + count]
            picked += count
        elif count:
            task.logits.append(result.logits[at : at + count])
            at += count
        if share.places and result.inside is not None:
            deep = len(share.places) if task.deep and task.look else 0
            task.inside.append(_part(result.inside, share, layers, seen, seen_deep))
            seen += len(share.places)
            seen_deep += deep
        if not task.queued:
            continue  # it was cancelled while the step was running
        tree.advance(task.branch, share.until)
        if error is not None or task.branch.computed >= task.goal - task.ahead:
            complete.append((task, error))
        else:
            task.report_progress()
    return complete


def _failure(result: StepResult, numbers: range) -> Exception | None:
    return next((error for n, error in result.failures.items() if n in numbers), None)


def _part(
    inside: Inside, share: Share, layers: tuple[int, ...] | None, start: int, deep_start: int
) -> Inside:
    """The share of one row in what was seen."""
    task, count, vectors = share.task, len(share.places), inside.residuals
    part = slice(start, start + count)
    if vectors is not None:
        if task.look or layers == task.watch:
            vectors = vectors[:, part]
        else:
            known = range(len(vectors)) if layers is None else layers
            vectors = vectors[[known.index(layer) for layer in task.watch], part]
    deep = slice(deep_start, deep_start + (count if task.look and task.deep else 0))
    parts = None if inside.parts is None else inside.parts[:, :, deep]
    recurrent = inside.recurrent[deep]
    return Inside(vectors, inside.attention[deep], parts, share.places[0], recurrent)
