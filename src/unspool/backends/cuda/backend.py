"""A model on a GPU behind the engine's contract.

Texts with one or a few new tokens go through captured steps; chunks of prompts, and whatever is to
be looked into, run kernel by kernel beside them. Nothing waits for the device but a step's result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.base import StepLimits
from unspool.backends.cuda.graphs import LINE_COUNTS, Graphs, padded, room_for
from unspool.backends.cuda.inputs import ROOM, Inputs, to_device
from unspool.backends.cuda.looks import Looker
from unspool.backends.cuda.pages import PAGE_SIZE, Pages, page_bytes
from unspool.backends.cuda.pick import DevicePicker
from unspool.backends.cuda.products import processors
from unspool.backends.cuda.program import Program
from unspool.backends.cuda.prompts import Prompts
from unspool.backends.cuda.weights import Weights
from unspool.backends.step import Inside, Ints, StepBatch, StepResult, no_ints
from unspool.errors import UnspoolError
from unspool.model.adapters import Adapter
from unspool.sampling.faults import BadLogitsError
from unspool.sampling.picker import HISTORY_END, HISTORY_START, PickRows

_LINES = LINE_COUNTS[-1]
_SHORT = 16  # a row with so many new tokens or fewer goes through a captured step
_PREFILL = 8192  # tokens of prompts in one step: enough to keep the matrix units busy
_WAIT = 0.05  # seconds that the next tokens of texts may wait for prompts beside them, about
_RATE = 3e12  # operations a second of one multiprocessor: about what prompts reach on a Hopper
_RING = 4  # results on their way

Floats64 = npt.NDArray[np.float64]


class CudaBackend:
    """Captured steps and prompts over one pool of pages."""

    overlaps = True
    page_size = PAGE_SIZE

    def __init__(
        self, weights: Weights, *, pages: Pages, context: int, exact: bool = False
    ) -> None:
        config, device = weights.config, weights.device
        self.limits = StepLimits(
            max_rows=256, prefill_tokens=_PREFILL, prefill_beside_decode=_beside_decode(weights)
        )
        self.page_count, self.page_bytes = pages.count, page_bytes(config, weights.dtype)
        self.vocab_size, self.context = config.vocab_size, context
        self._device, self._pages = device, pages
        outcomes = _PREFILL + _LINES
        columns = -(-context // PAGE_SIZE) + 1
        self.inputs = Inputs(_LINES, outcomes, columns, pages.spare, device)
        self.program = Program(weights, pages, self.inputs, context, exact)
        self._graphs = Graphs(device)
        self._prompts = Prompts(self.program)
        self._logprobs = torch.zeros(_LINES + outcomes, dtype=torch.float64, device=device)
        self._picker = self._new_picker(slice(0, _LINES))
        self._picker.floats, self._picker.ints = self.inputs.floats, self.inputs.ints
        self._prompt_picker = self._new_picker(slice(_LINES, None))
        self._no_logits = torch.empty(0, self.vocab_size, device=device)
        self._places = no_ints()  # of the picks of the step before, among all outcomes
        self._results = [_Room(_LINES + outcomes, device) for _ in range(_RING)]
        self._turn = 0

    def _new_picker(self, where: slice) -> DevicePicker:
        picks, logprobs = self.inputs.previous[where], self._logprobs[where]
        picker = DevicePicker(len(picks), self.vocab_size, self._device)
        picker.picks, picker.logprobs, picker.previous = picks, logprobs, self.inputs.previous
        return picker

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        raise UnspoolError(
            "adapters cannot be loaded on the GPU's own kernels yet; load the model with "
            "backend='torch', or merge the adapter into it: unspool train merge"
        )

    def launch(self, batch: StepBatch) -> _Flight:
        try:
            return self._launch(batch)
        except torch.OutOfMemoryError as error:
            raise UnspoolError(
                f"the GPU's memory is full: a step of {len(batch.tokens):,} tokens found no room "
                "beside weights and pages; leave less to keys and values (memory=...)"
            ) from error

    @torch.inference_mode()
    def _launch(self, batch: StepBatch) -> _Flight:
        parts = _Parts(batch)
        _check(batch, self)
        if self.inputs.make_room(batch.slots):
            self._graphs.clear()
        changed = no_ints(), no_ints()
        if len(batch.updates.slots):
            places = self.inputs.places(batch.updates.slots, batch.updates.columns)
            changed = places, batch.updates.pages
        if len(parts.prompts) or len(batch.copies) or len(changed[0]) > ROOM:
            self.inputs.update_now(*changed)
            changed = no_ints(), no_ints()
        if len(batch.copies):
            self._pages.copy(batch.copies)
        logits: list[Tensor] = []
        inside: Inside | None = None
        prompts = None
        if len(parts.prompts):  # first: the captured step overwrites what was picked before it
            wanted = np.concatenate((parts.sampled_prompts, parts.logits_of_prompts))
            prompts = self._prompts.prepared(
                batch, parts.prompt_rows, parts.prompts, wanted, self._resolved(batch, parts)
            )
        if parts.count:
            logits.append(self._captured(batch, parts, changed))
        if prompts is not None:
            looker = Looker(self.program, batch, batch.look) if batch.look else None
            found = self._prompts.run(prompts, looker)
            inside = looker.inside() if looker else None
            if parts.prompt_pick is not None:
                self._pick_prompts(found[: len(parts.prompt_pick.ints)], parts.prompt_pick)
            logits.append(found[len(parts.sampled_prompts) :].float())
        self._places = parts.places
        return self._flight(batch, parts, logits, inside)

    # -- captured steps ------------------------------------------------------------------------

    def _captured(self, batch: StepBatch, parts: _Parts, changed: tuple[Ints, Ints]) -> Tensor:
        """Run the lines; gives the logits that were asked for of them."""
        lines, count = parts.lines, parts.count
        ends = batch.visible_end[lines]
        size, room = padded(count), min(room_for(int(ends.max())), self.context)
        sampled, penalties = False, False
        picks = None
        if parts.line_pick is not None:
            pick, numbers = parts.line_pick, parts.sampled_lines
            sampled = bool((pick.floats[:, 0] != 0).any())
            penalties = bool(len(pick.history))
            picks = (numbers, pick.floats, self._with_history(pick))
        self.inputs.send(
            count, size, self._resolved_tokens(batch.tokens[lines]), batch.positions[lines], ends,
            parts.slots, changed, picks,
        )  # fmt: skip
        fresh, picker = parts.fresh, self._picker

        def launch() -> None:
            self.program.step(size, room, fresh)
            picker.launch(self.program.logits[:size], sampled=sampled, penalties=penalties)

        self._graphs.run((size, room, fresh, sampled, penalties), launch)
        wanted = parts.logits_of_lines
        if not len(wanted):
            return self._no_logits
        return self.program.logits[to_device(wanted, self._device)].float()

    def _with_history(self, pick: PickRows) -> Ints:
        """Bring what the penalties see to the device."""
        if len(pick.history):
            if len(pick.history) > len(self._picker.history):
                size = 2 * len(pick.history)
                self._picker.history = torch.zeros(size, dtype=torch.int64, device=self._device)
                self._graphs.clear()
            history = to_device(self._resolved_tokens(pick.history), self._device)
            self._picker.history[: len(history)].copy_(history)
        return pick.ints

    def _resolved_tokens(self, tokens: Ints) -> Ints:
        """-1 - n, the n-th pick of the step before, as the place of that pick on the device."""
        ahead = tokens < 0
        if not ahead.any():
            return tokens
        tokens = tokens.copy()
        tokens[ahead] = -1 - self._places[-1 - tokens[ahead]]
        return tokens

    # -- prompts -------------------------------------------------------------------------------

    def _resolved(self, batch: StepBatch, parts: _Parts) -> Tensor:
        """The tokens of the prompts on the device."""
        tokens = to_device(self._resolved_tokens(batch.tokens[parts.prompts]), self._device)
        if int(batch.tokens[parts.prompts].min()) < 0:
            before = self.inputs.previous[(-1 - tokens).clamp_min(0)].clamp_min(0)
            tokens = torch.where(tokens < 0, before, tokens)
        return tokens

    def _pick_prompts(self, logits: Tensor, pick: PickRows) -> None:
        picker, count = self._prompt_picker, len(pick.ints)
        picker.floats[:count].copy_(to_device(pick.floats, self._device))
        picker.ints[:count].copy_(to_device(pick.ints, self._device))
        if len(pick.history):
            picker.history = to_device(self._resolved_tokens(pick.history), self._device)
        picker.launch(logits, penalties=bool(len(pick.history)))

    # -- results -------------------------------------------------------------------------------

    def _flight(
        self, batch: StepBatch, parts: _Parts, logits: list[Tensor], inside: Inside | None
    ) -> _Flight:
        room = self._results[self._turn]
        self._turn = (self._turn + 1) % _RING
        if len(parts.places):
            last = int(parts.places.max()) + 1
            room.take(self.inputs.previous, self._logprobs, last)
        asked = torch.cat(logits) if len(logits) > 1 else logits[0]
        if len(batch.logits) and parts.mixed_logits is not None:
            asked = asked[to_device(parts.mixed_logits, self._device)]
        return _Flight(room, parts.places, asked, inside, room.record())


def _beside_decode(weights: Weights) -> int:
    """How many tokens of prompts may be read while texts are written."""
    numbers = sum(matrix.rows * matrix.columns for matrix in weights.matrices())
    rate = _RATE * processors(weights.device)
    return max(512, min(_PREFILL, int(_WAIT * rate / (2 * numbers))))


class _Parts:
    """Which tokens of a step are lines of a captured step, and which belong to prompts."""

    lines: Ints | slice
    mixed_logits: Ints | None

    def __init__(self, batch: StepBatch) -> None:
        # How far tokens see beyond themselves: nothing, in a text that is written left to right.
        causal = int((batch.visible_end - batch.positions).max(initial=0)) == 1
        self.fresh = causal
        if len(batch.tokens) == len(batch.slots) <= _LINES and not batch.look:
            self._only_lines(batch, batch.slots)  # one next token each: most steps are so
            return
        counts = np.diff(batch.starts)
        every, pick = np.arange(len(batch.tokens)), batch.pick
        short = counts <= _SHORT
        if batch.look or int(counts[short].sum()) > _LINES:
            short[:] = False
        self.fresh = causal and bool((counts[short] == 1).all())
        line_of = np.repeat(batch.slots, counts)
        if short.all():
            self._only_lines(batch, line_of)
            return
        is_line = np.repeat(short, counts)
        self.lines, self.prompts = every[is_line], every[~is_line]
        self.count, self.slots = len(self.lines), line_of[is_line]
        self.prompt_rows = np.flatnonzero(~short)
        number = np.where(is_line, np.cumsum(is_line), np.cumsum(~is_line)) - 1
        mine, asked = is_line[batch.sampled], is_line[batch.logits]
        self.sampled_lines = number[batch.sampled[mine]]
        self.sampled_prompts = number[batch.sampled[~mine]]
        self.line_pick, self.prompt_pick = _chosen(pick, mine), _chosen(pick, ~mine)
        self.places = np.empty(len(batch.sampled), np.int64)
        self.places[mine] = self.sampled_lines
        self.places[~mine] = _LINES + np.arange(len(self.sampled_prompts))
        self.logits_of_lines = number[batch.logits[asked]]
        self.logits_of_prompts = number[batch.logits[~asked]]
        order = np.empty(len(batch.logits), np.int64)
        order[asked] = np.arange(asked.sum())
        order[~asked] = asked.sum() + np.arange((~asked).sum())
        self.mixed_logits = order

    def _only_lines(self, batch: StepBatch, slots: Ints) -> None:
        self.lines, self.prompts = slice(None), no_ints()
        self.count, self.slots = len(slots), slots
        self.sampled_lines, self.sampled_prompts = batch.sampled, no_ints()
        self.line_pick, self.prompt_pick = batch.pick, None
        self.places = batch.sampled
        self.logits_of_lines, self.mixed_logits = batch.logits, None


def _chosen(pick: PickRows | None, rows: npt.NDArray[np.bool_]) -> PickRows | None:
    if pick is None or not rows.any():
        return None
    if rows.all():
        return pick
    ints = pick.ints[rows]
    seen = bool((ints[:, HISTORY_END] > ints[:, HISTORY_START]).any())
    return PickRows(pick.floats[rows], ints, pick.history if seen else no_ints())


class _Room:
    """The host's memory for one step's picks."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        pinned = self._on_device
        self.picks = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self.logprobs = torch.zeros(size, dtype=torch.float64, pin_memory=pinned)
        self._done = torch.cuda.Event() if self._on_device else None

    def take(self, picks: Tensor, logprobs: Tensor, count: int) -> None:
        self.picks[:count].copy_(picks[:count], non_blocking=True)
        self.logprobs[:count].copy_(logprobs[:count], non_blocking=True)

    def record(self) -> torch.cuda.Event | None:
        if self._done is not None:
            self._done.record()
        return self._done


@dataclass(slots=True)
class _Flight:
    """A step on its way; its room is used again a few steps later."""

    room: _Room
    places: Ints
    logits: Tensor
    inside: Inside | None
    done: torch.cuda.Event | None

    def ready(self) -> bool:
        return self.done is None or bool(self.done.query())

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        tokens = self.room.picks.numpy()[self.places]
        logprobs = self.room.logprobs.numpy()[self.places]
        failures: dict[int, Exception] = {}
        if len(tokens) and int(tokens.min()) < 0:
            for number in np.flatnonzero(tokens < 0).tolist():
                failures[number] = BadLogitsError(
                    "the model gave logits that nothing can be picked from (NaN, or all -inf)",
                    (number,),
                )
        return StepResult(tokens, logprobs, self.logits, self.inside, failures)


def _check(batch: StepBatch, backend: CudaBackend) -> None:
    """A kernel that is told nonsense writes where it must not."""
    size, pages = len(batch.tokens), batch.updates.pages
    wrong = (
        size == 0
        or int(batch.tokens.max()) >= backend.vocab_size
        or int(batch.positions.min()) < 0
        or int(batch.visible_end.max()) > backend.context
        or (len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < backend.page_count)
    )
    if wrong:
        raise UnspoolError("the batch names a token, a position or a page that does not exist")
