"""Builds a `StepBatch` from planned rows, and scatters its result back to them."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from unspool.backends.interventions import SpanCollector
from unspool.backends.step import Observations, ObserveRequest, StepBatch, StepResult, TableUpdates
from unspool.engine.drafting import DraftRow
from unspool.engine.scheduler import EngineTask
from unspool.engine.tree import Branch, Tree
from unspool.sampling.picker import HISTORY_END, HISTORY_START, POSITION, Ints, SamplingRows

_EMPTY = np.empty(0, np.int64)
_ONE = np.ones(1, np.int64)  # adding an array takes half the time of adding a number
_NO_COPIES = np.empty((0, 2), np.int64)
_NO_UPDATES = TableUpdates()
_has_placeholder = attrgetter("has_placeholder")


@dataclass(slots=True)
class RowSlice:
    """One row's part of a step."""

    task: EngineTask
    end: int  # the row computes the positions up to here
    num_outputs: int  # of its last tokens
    is_sampled: bool  # by the backend, which returns tokens instead of logits
    observed: list[int]  # positions whose activations are returned


class BatchBuilder:
    """Builds the batches of one tree.

    A text's sampling parameters stay the same from token to token, so they are kept in arrays by
    the text's slot (its row of the block table).
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._floats, self._ints = np.zeros((8, 6)), np.zeros((8, 6), np.int64)
        self._range = np.arange(8)

    def build(self, rows: list[EngineTask]) -> tuple[StepBatch, list[RowSlice] | None]:
        """Build the step that computes each task's branch up to `task.scheduled_end`.

        Returns:
            The step, and each row's part of it; None if every row continues by one sampled token.
        """
        if all(map(_has_placeholder, rows)):
            return self._build_continued(rows), None
        tree, size = self._tree, self._tree.page_size
        # Not `list[int]()`, which takes ten times as long.
        slices: list[RowSlice] = []
        tokens: list[int] = []
        starts: list[int] = [0]
        firsts: list[int] = []
        slots: list[int] = []
        table: list[tuple[int, int, int]] = []
        sampled: list[int] = []
        sampled_slots: list[int] = []
        logits: list[int] = []
        observed: list[int] = []
        deep: list[int] = []
        bidirectional: list[int] = []  # rows whose tokens see tokens after them
        layers: set[int] | None = set()  # whose hidden states are returned; None: all
        draft_rows: list[tuple[int, DraftRow]] = []
        adapters: list[int] = []
        histories: _PenaltyHistories | None = None
        canvas_picks: list[tuple[int, SamplingRows]] = []  # index of the first pick, and the rows
        spans: SpanCollector | None = None  # of the rows with interventions
        site_tokens: list[int] = []  # whose values at the sites are returned
        sites: dict[tuple[str, int], None] = {}
        for row, task in enumerate(rows):
            branch, first, until = task.branch, task.scheduled_start, task.scheduled_end
            start, at = branch.start, starts[row]
            tokens += branch.tail[first - start : until - start]
            end = at + until - first
            firsts.append(first)
            starts.append(end)
            slot = branch.slot if branch.slot >= 0 else self._assign_slot(task)
            slots.append(slot)
            has_two = branch.canvas_adapter is not None
            adapters.append(_row_adapter(branch, first) if has_two else branch.adapter)
            if branch.num_table_pages * size < until:
                table += _new_table_entries(branch)
            task.steps_in_flight += 1
            if branch.interventions is not None:
                spans = spans or SpanCollector()
                spans.add(branch.interventions, first, until, at)
            if task.has_placeholder:  # most rows: one token is sampled, nothing is observed
                if task.sees_history:
                    histories = histories or _PenaltyHistories()
                    histories.add(task, len(sampled), 1)
                task.pick_number = len(sampled)
                sampled.append(at)
                sampled_slots.append(slot)
                slices.append(RowSlice(task, until, 1, True, []))
                continue
            num_outputs = max(0, until - max(first, branch.length - task.num_logits))
            is_sampled = num_outputs > 0 and not task.samples_on_host
            if num_outputs:
                if not is_sampled:
                    logits += range(end - num_outputs, end)
                elif task.pick_rows is not None:
                    start_index = end - num_outputs
                    places = _select_rows(task, until - num_outputs, until)
                    num_outputs = len(places.ints)
                    if num_outputs and len(places.history):
                        histories = histories or _PenaltyHistories()
                        histories.add_rows(places, len(sampled))
                    canvas_picks.append((len(sampled), places))
                    sampled += range(start_index, start_index + num_outputs)
                    sampled_slots += (0,) * num_outputs  # replaced below
                else:
                    if task.sees_history:
                        histories = histories or _PenaltyHistories()
                        histories.add(task, len(sampled), num_outputs)
                    task.pick_number = len(sampled)
                    sampled += range(end - num_outputs, end)
                    sampled_slots += (slot,) * num_outputs
            row_observed: list[int] = []
            if task.observed_positions:
                row_observed = [p for p in sorted(task.observed_positions) if first <= p < until]
                indices = [p - first + at for p in row_observed]
                if task.observed_sites:
                    site_tokens += indices
                    sites.update(dict.fromkeys(task.observed_sites))
                else:
                    observed += indices
                    deep += indices if task.observe_attention else []
                    layers = None
            elif task.hidden_layers:
                row_observed = list(range(first, until))
                observed += range(at, end)
                if layers is not None:
                    layers.update(task.hidden_layers)
            if isinstance(task, DraftRow) and task.sources:
                draft_rows.append((slot, task))
            if branch.provisional is not None or branch.block:
                bidirectional.append(row)
            slices.append(RowSlice(task, until, num_outputs, is_sampled, row_observed))
        count = len(tokens)
        positions, row_slots = np.array(firsts), np.array(slots)
        if count == len(rows):  # one token a row, as in most steps
            row_starts = self._first_integers(count + 1)
        else:  # the positions of a row are consecutive
            row_starts = np.array(starts)
            counts = np.diff(row_starts)
            positions = np.arange(count) + np.repeat(positions - row_starts[:-1], counts)
        next_positions = positions + _ONE
        visible_end = next_positions.copy() if bidirectional else next_positions
        for row in bidirectional:
            part = slice(starts[row], starts[row + 1])
            visible_end[part] = _visible_end(rows[row].branch, positions[part])
        sampled_at, pick = _EMPTY, None
        if sampled:
            if len(sampled) == len(rows) == count and not canvas_picks:
                sampled_at, pick_slots = self._first_integers(count), row_slots
                pick_positions = next_positions
            else:  # `take` is twice as quick as an index on short arrays
                sampled_at, pick_slots = np.array(sampled), np.array(sampled_slots)
                pick_positions = next_positions.take(sampled_at)
            pick = self._sampling_rows(pick_slots, pick_positions)
            if canvas_picks:
                _write_canvas_rows(pick, canvas_picks)
            if histories:
                pick.history = histories.write(pick.ints)
        states = captures = _NO_COPIES
        if tree.states is not None:
            states, captures = tree.states.rows([task.branch for task in rows], firsts, starts)
        copies = tree.take_copies() if tree.copies else None
        return StepBatch(
            tokens=np.array(tokens),
            positions=positions,
            visible_end=visible_end,
            row_starts=row_starts,
            slots=row_slots,
            table_updates=TableUpdates(*np.array(table).T) if table else _NO_UPDATES,
            page_copies=np.array(copies) if copies else _NO_COPIES,
            sample_indices=sampled_at,
            sampling=pick,
            logits_indices=np.array(logits) if logits else _EMPTY,
            observe=_build_look(observed, deep, layers, site_tokens, sites)
            if observed or site_tokens
            else None,
            adapters=np.array(adapters) if any(adapters) else _EMPTY,
            echoes=_find_echoes(rows, starts, draft_rows) if draft_rows else _NO_COPIES,
            state_slots=states,
            state_captures=captures,
            interventions=None if spans is None else spans.build(),
        ), slices

    def _build_continued(self, rows: list[EngineTask]) -> StepBatch:
        """Build a step in which every row computes the token that is being sampled for it.

        Most steps of many texts are like this, and a GPU waits for them.
        """
        tree, size = self._tree, self._tree.page_size
        table: list[tuple[int, int, int]] = []
        histories: _PenaltyHistories | None = None
        spans: SpanCollector | None = None
        for row, task in enumerate(rows):
            branch = task.branch
            if branch.num_table_pages * size < task.scheduled_end:
                table += _new_table_entries(branch)
            if branch.interventions is not None:
                spans = spans or SpanCollector()
                spans.add(branch.interventions, task.scheduled_start, task.scheduled_end, row)
            if task.sees_history:
                histories = histories or _PenaltyHistories()
                histories.add(task, row, 1)
            task.steps_in_flight += 1
            task.pick_number = row
        branches = [task.branch for task in rows]
        row_starts = self._first_integers(len(rows) + 1)
        positions = np.array([task.scheduled_start for task in rows])
        slots = np.array([branch.slot for branch in branches])
        visible_end = positions + _ONE
        sampling = self._sampling_rows(slots, visible_end)
        if histories:
            sampling.history = histories.write(sampling.ints)
        adapters = [branch.adapter for branch in branches]
        states = captures = _NO_COPIES
        if tree.states is not None:
            states, captures = tree.states.rows(branches, positions.tolist(), row_starts.tolist())
        copies = tree.take_copies() if tree.copies else None
        return StepBatch(
            tokens=np.array([branch.tail[-1] for branch in branches]),
            positions=positions,
            visible_end=visible_end,
            row_starts=row_starts,
            slots=slots,
            table_updates=TableUpdates(*np.array(table).T) if table else _NO_UPDATES,
            page_copies=np.array(copies) if copies else _NO_COPIES,
            sample_indices=row_starts[:-1],
            sampling=sampling,
            logits_indices=_EMPTY,
            adapters=np.array(adapters) if any(adapters) else _EMPTY,
            echoes=_NO_COPIES,
            state_slots=states,
            state_captures=captures,
            interventions=None if spans is None else spans.build(),
        )

    def _sampling_rows(self, slots: Ints, positions: Ints) -> SamplingRows:
        """Return the sampling parameters of texts at these positions."""
        ints = self._ints.take(slots, 0)
        ints[:, POSITION] += positions  # on top of the truncated tokens
        return SamplingRows(self._floats.take(slots, 0), ints, _EMPTY)

    def _first_integers(self, count: int) -> Ints:
        """Return 0, 1, 2, ... as a view: the arrays of a batch are never written to."""
        if count > len(self._range):
            self._range = np.arange(2 * count)
        return self._range[:count]

    def _assign_slot(self, task: EngineTask) -> int:
        """Give a task its slot at its first step, and store its sampling parameters there."""
        slot = self._tree.slot_of(task.branch)
        if task.pick_floats is not None:
            while slot >= len(self._floats):
                self._floats = np.concatenate((self._floats, self._floats))
                self._ints = np.concatenate((self._ints, self._ints))
            self._floats[slot], self._ints[slot] = task.pick_floats, task.pick_ints
        return slot


def _new_table_entries(branch: Branch) -> list[tuple[int, int, int]]:
    """Return slot, column and page of the branch's pages that are not in the block table yet."""
    first = branch.num_table_pages
    entries = [
        (branch.slot, column, page) for column, page in enumerate(branch.pages_from(first), first)
    ]
    branch.num_table_pages = first + len(entries)
    return entries


def _row_adapter(branch: Branch, first: int) -> int:
    """Return the adapter of a row that starts at `first`: a canvas may have its own."""
    is_canvas = branch.provisional is not None and first >= branch.provisional
    if is_canvas and branch.canvas_adapter is not None:
        return branch.canvas_adapter
    return branch.adapter


def _visible_end(branch: Branch, positions: Ints) -> Ints:
    """Return the end of what each token attends to, where attention is not causal: the end of the
    token's block, or of the canvas."""
    if branch.block:
        return np.minimum((positions // branch.block + 1) * branch.block, branch.length)
    return np.where(positions >= (branch.provisional or 0), branch.length, positions + 1)


def _build_look(
    observed: list[int],
    deep: list[int],
    layers: set[int] | None,
    site_tokens: list[int],
    sites: dict[tuple[str, int], None],
) -> ObserveRequest:
    indices = np.array(deep, np.int64)
    sorted_layers = None if layers is None else tuple(sorted(layers))
    return ObserveRequest(
        residuals=np.array(observed, np.int64),
        layers=sorted_layers,
        attention=indices,
        parts=indices,
        tokens=np.array(site_tokens, np.int64),
        sites=tuple(sites),
    )


def _find_echoes(
    rows: list[EngineTask], starts: list[int], draft_rows: list[tuple[int, DraftRow]]
) -> Ints:
    """Return (token index, slot) for each token that is written into another row's pages too."""
    offsets = {
        task: start - task.scheduled_start for task, start in zip(rows, starts, strict=False)
    }
    echoes = [
        (offsets[source] + position, slot)
        for slot, draft_row in draft_rows
        for source, positions in draft_row.sources
        for position in positions
    ]
    return np.array(sorted(echoes))


class _PenaltyHistories:
    """The tokens that the penalties of a step's picks see, in one array."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._length = 0
        self._ranges: list[tuple[int, int, int]] = []  # index of the pick, start, end

    def add(self, task: EngineTask, first_pick: int, count: int) -> None:
        """Add the ranges of `count` picks of one text."""
        tokens, ranges = task.penalty_ranges(count)
        first, last = ranges[0][0], ranges[-1][1]
        shift = self._length - first
        for offset, (start, end) in enumerate(ranges):
            self._ranges.append((first_pick + offset, start + shift, end + shift))
        self._parts.append(tokens[first:last])
        self._length += last - first

    def add_rows(self, rows: SamplingRows, first_pick: int) -> None:
        """Add the ranges of a canvas's places, which share one history."""
        bounds = rows.ints[:, HISTORY_START : HISTORY_END + 1] + self._length
        self._ranges += [(first_pick + n, *pair) for n, pair in enumerate(bounds.tolist())]
        self._parts.append(rows.history)
        self._length += len(rows.history)

    def write(self, ints: Ints) -> Ints:
        """Write each pick's range into its sampling parameters; return the concatenated tokens."""
        picks, starts, ends = np.array(self._ranges).T
        ints[picks, HISTORY_START], ints[picks, HISTORY_END] = starts, ends
        return np.concatenate(self._parts)


def _select_rows(task: EngineTask, start: int, end: int) -> SamplingRows:
    """Return the sampling settings of a canvas's outputs from position `start` to before `end`."""
    assert task.pick_rows is not None
    rows, first = task.pick_rows, task.branch.length - task.num_logits
    part = slice(start - first, end - first)
    assert rows.canvas is not None
    return SamplingRows(rows.floats[part], rows.ints[part], rows.history, rows.canvas[part])


def _write_canvas_rows(pick: SamplingRows, canvas_picks: list[tuple[int, SamplingRows]]) -> None:
    """Replace the settings of the picks that belong to canvases."""
    pick.canvas = np.full((len(pick.ints), 2), -1)
    for first, rows in canvas_picks:
        assert rows.canvas is not None
        part = slice(first, first + len(rows.ints))
        pick.floats[part], pick.ints[part], pick.canvas[part] = rows.floats, rows.ints, rows.canvas


def scatter_results(
    tree: Tree, slices: list[RowSlice], result: StepResult, layers: tuple[int, ...] | None = None
) -> list[tuple[EngineTask, Exception | None]]:
    """Advance each branch and give each task its part of the result.

    Returns:
        The tasks whose branch is computed to its end, each with its error if sampling failed.
    """
    picks = list(zip(result.tokens.tolist(), result.logprobs.tolist(), strict=True))
    # Outputs handed out so far.
    num_logits = num_picked = num_observed = num_deep = num_site_tokens = 0
    complete: list[tuple[EngineTask, Exception | None]] = []
    for part in slices:
        task, count, error = part.task, part.num_outputs, None
        task.steps_in_flight -= 1
        if part.is_sampled:
            if result.failures:
                error = _find_failure(result, range(num_picked, num_picked + count))
            if count == 1:
                task.picked.append(picks[num_picked])
            else:
                task.picked += picks[num_picked : num_picked + count]
            if task.pick_rows is not None and result.details is not None:
                task.details.append(result.details[num_picked : num_picked + count])
            num_picked += count
        elif count:
            task.logits.append(result.logits[num_logits : num_logits + count])
            num_logits += count
        if part.observed and result.observations is not None and task.observed_sites:
            end = num_site_tokens + len(part.observed)
            values = {
                name: result.observations.sites[name][num_site_tokens:end]
                for name in task.observed_sites
            }
            num_site_tokens = end
            task.inside.append(Observations(first_position=part.observed[0], sites=values))
        elif part.observed and result.observations is not None:
            task.inside.append(
                _slice_inside(result.observations, part, layers, num_observed, num_deep)
            )
            num_observed += len(part.observed)
            if task.observe_attention and task.observed_positions:
                num_deep += len(part.observed)
        if not task.queued:
            continue  # cancelled while the step was in flight
        tree.advance(task.branch, part.end)
        if error is not None or task.branch.num_computed >= task.target_len - task.has_placeholder:
            complete.append((task, error))
        else:
            task.report_progress()
    return complete


def scatter_continued(
    tree: Tree, rows: list[EngineTask], result: StepResult
) -> list[tuple[EngineTask, Exception | None]]:
    """Do what `scatter_results` does, for a step that continues every row by one token."""
    size, failures = tree.page_size, result.failures
    complete: list[tuple[EngineTask, Exception | None]] = []
    picks = zip(result.tokens.tolist(), result.logprobs.tolist(), strict=True)
    for row, (task, pick) in enumerate(zip(rows, picks, strict=True)):
        task.steps_in_flight -= 1
        task.picked.append(pick)
        if task.queued:  # not cancelled while the step was in flight
            branch = task.branch
            branch.num_computed = computed = branch.num_computed + 1
            if computed - branch.start >= size:
                tree.advance(branch, computed)
            complete.append((task, failures.get(row)))
    return complete


def _find_failure(result: StepResult, picks: range) -> Exception | None:
    return next((error for n, error in result.failures.items() if n in picks), None)


def _slice_inside(
    inside: Observations, row: RowSlice, layers: tuple[int, ...] | None, start: int, deep_start: int
) -> Observations:
    """Return one row's part of the activations."""
    task, count, residuals = row.task, len(row.observed), inside.residuals
    part = slice(start, start + count)
    is_deep = bool(task.observed_positions) and task.observe_attention
    if residuals is not None:
        if task.observed_positions or layers == task.hidden_layers:
            residuals = residuals[:, part]
        else:
            returned_layers = range(len(residuals)) if layers is None else layers
            indices = [returned_layers.index(layer) for layer in task.hidden_layers]
            residuals = residuals[indices, part]
    deep = slice(deep_start, deep_start + (count if is_deep else 0))
    parts = None if inside.parts is None else inside.parts[:, :, deep]
    recurrent = inside.recurrent[deep]
    return Observations(residuals, inside.attention[deep], parts, row.observed[0], recurrent)
