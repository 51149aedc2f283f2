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
_NO_ADAPTERS = np.empty(0, np.int64)


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

    def build(self, rows: list[Task]) -> tuple[StepBatch, list[Share]]:
        """The step that computes each task's branch up to `task.until`."""
        tree, size = self._tree, self._tree.page_size
        shares, tokens, starts = list[Share](), list[int](), [0]
        firsts, slots = list[int](), list[int]()
        table: list[tuple[int, int, int]] = []
        sampled, lines, logits = list[int](), list[int](), list[int]()
        seen, deep, blocks = list[int](), list[int](), list[tuple[int, int]]()
        adapters = list[int]()
        histories = _Histories()
        for row, task in enumerate(rows):
            branch, first, until = task.branch, task.first, task.until
            start, at = branch.start, starts[row]
            tokens += branch.tail[first - start : until - start]
            end = at + until - first
            firsts.append(first)
            starts.append(end)
            slot = branch.slot if branch.slot >= 0 else self._enter(task)
            slots.append(slot)
            adapters.append(branch.adapter)
            column = branch.tabled
            if column * size < until:
                for page in branch.pages_from(column):
                    table.append((slot, column, page))
                    column += 1
                branch.tabled = column
            outcomes = max(0, until - max(first, branch.length - task.wanted))
            if outcomes:
                if task.pick_floats is None:
                    logits += range(end - outcomes, end)
                else:
                    if task.sees_history:
                        histories.add(task, len(sampled), outcomes)
                    task.pick_number = len(sampled)
                    sampled += range(end - outcomes, end)
                    lines += (slot,) * outcomes
            places: list[int] = []
            if task.look:
                places = [p for p in sorted(task.look) if first <= p < until]
                seen += [p - first + at for p in places]
                deep += [p - first + at for p in places] if task.deep else []
            if branch.provisional is not None:
                blocks.append((row, branch.provisional))
            task.flights += 1
            shares.append(Share(task, until, outcomes, places))
        begins = np.array(starts)
        positions = np.array(firsts)
        if len(tokens) > len(rows):  # a row's positions follow one another
            counts = np.diff(begins)
            positions = np.arange(len(tokens)) + np.repeat(positions - begins[:-1], counts)
        behind = positions + 1
        visible_end = behind.copy() if blocks else behind
        for row, provisional in blocks:  # its tokens see each other too
            mine = slice(starts[row], starts[row + 1])
            inside = positions[mine] >= provisional
            visible_end[mine] = np.where(inside, rows[row].until, visible_end[mine])
        picked_after = np.array(sampled, np.int64)
        pick = None
        if sampled:
            of_picks = np.array(lines)  # `take` is twice as quick as an index where there are few
            ints = self._ints.take(of_picks, 0)
            ints[:, POSITION] = behind.take(picked_after)
            pick = PickRows(self._floats.take(of_picks, 0), ints, histories.put(ints))
        copies, tree.copies = tree.copies, []
        return StepBatch(
            tokens=np.array(tokens),
            positions=positions,
            visible_end=visible_end,
            starts=begins,
            slots=np.array(slots),
            updates=TableUpdates(*np.array(table).T) if table else _NO_UPDATES,
            copies=np.array(copies) if copies else _NO_COPIES,
            sampled=picked_after,
            pick=pick,
            logits=np.array(logits, np.int64),
            look=_look(seen, deep),
            adapters=np.array(adapters) if any(adapters) else _NO_ADAPTERS,
        ), shares

    def _enter(self, task: Task) -> int:
        """A task's first step: its line of the block table, and of the numbers for its picks."""
        slot = self._tree.slot_of(task.branch)
        if task.pick_floats is not None:
            while slot >= len(self._floats):
                self._floats = np.concatenate((self._floats, self._floats))
                self._ints = np.concatenate((self._ints, self._ints))
            self._floats[slot], self._ints[slot] = task.pick_floats, task.pick_ints
        return slot


def _look(seen: list[int], deep: list[int]) -> Look | None:
    if not seen:
        return None
    whole = np.array(deep, np.int64)
    return Look(residuals=np.array(seen), attention=whole, parts=whole)


class _Histories:
    """What the penalties of a step's picks see."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._length = 0
        self._ranges: list[tuple[int, int, int]] = []  # number of the pick, start, end

    def add(self, task: Task, number: int, count: int) -> None:
        """For so many picks of one text, the first of them with this number."""
        text, start, end = task.penalized()
        part = text[start : end + count - 1]
        base = self._length
        self._parts.append(part)
        self._length += len(part)
        for more in range(count):
            self._ranges.append((number + more, base, base + end - start + more))

    def put(self, ints: Ints) -> Ints:
        """Write into the picks' numbers where their histories are; all of them in one array."""
        if not self._ranges:
            return _NO_HISTORY
        numbers, starts, ends = np.array(self._ranges).T
        ints[numbers, HISTORY_START], ints[numbers, HISTORY_END] = starts, ends
        return np.concatenate(self._parts)


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
