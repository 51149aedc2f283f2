"""A model on a GPU behind the engine's contract.

Texts with one or a few new tokens go through captured steps; chunks of prompts, and whatever is to
be looked into, run kernel by kernel beside them. Nothing waits for the device but a step's result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.base import StepLimits
from unspool.backends.cuda.graphs import LINE_COUNTS, Graphs, padded, room_for
from unspool.backends.cuda.inputs import ROOM, Inputs, to_device
from unspool.backends.cuda.looks import Looker
from unspool.backends.cuda.outcomes import Flight, Outcomes
from unspool.backends.cuda.pages import PAGE_SIZE, Pages, page_bytes
from unspool.backends.cuda.pick import DevicePicker
from unspool.backends.cuda.products import processors
from unspool.backends.cuda.program import Program
from unspool.backends.cuda.prompts import Prompts
from unspool.backends.cuda.taps import Taps
from unspool.backends.cuda.weights import Weights
from unspool.backends.step import Inside, Ints, Look, StepBatch, largest, no_ints, smallest
from unspool.errors import UnspoolError
from unspool.model.adapters import Adapter
from unspool.sampling.picker import HISTORY_END, HISTORY_START, PickRows

_LINES = LINE_COUNTS[-1]
_SHORT = 16  # a row with so many new tokens or fewer goes through a captured step
_PREFILL = 8192  # tokens of prompts in one step: enough to keep the matrix units busy
_WAIT = 0.05  # seconds that the next tokens of texts may wait for prompts beside them, about
_RATE = 3e12  # operations a second of one multiprocessor: about what prompts reach on a Hopper
_NOTHING = no_ints()


class CudaBackend:
    """Captured steps and prompts over one pool of pages."""

    overlaps = True
    echoes = False
    state_bytes = state_count = 0
    page_size = PAGE_SIZE

    @torch.inference_mode(False)  # what it makes is written to in either mode
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
        prompts = _PREFILL + _LINES
        columns = -(-context // PAGE_SIZE) + 1
        self._outcomes = Outcomes(_LINES, prompts, self.vocab_size, device)
        self.inputs = Inputs(_LINES, self._outcomes.picks, columns, pages.spare, device)
        self.program = Program(weights, pages, self.inputs, context, exact)
        self._graphs = Graphs(device)
        self._prompts = Prompts(self.program)
        self._taps: dict[tuple[int, ...], Taps] = {}
        picks = self._outcomes.picks
        self._picker = self._new_picker(picks[:_LINES], self._outcomes.logprobs_of_lines)
        self._picker.floats, self._picker.ints = self.inputs.floats, self.inputs.ints
        self._prompt_picker = self._new_picker(picks[_LINES:], self._outcomes.logprobs_of_prompts)
        # Where the picks of the step before lie among all; None: the n-th at place n.
        self._places: Ints | None = None

    def _new_picker(self, picks: Tensor, logprobs: Tensor) -> DevicePicker:
        picker = DevicePicker(len(picks), self.vocab_size, self._device)
        picker.picks, picker.logprobs, picker.previous = picks, logprobs, self._outcomes.picks
        return picker

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        if self.program.adapters.set(number, adapter):
            self._graphs.clear()

    def launch(self, batch: StepBatch) -> Flight:
        _check(batch, self)
        try:
            if self.inputs.make_room(batch.slots):
                self._graphs.clear()
            parts = _Parts(batch)
            if len(batch.adapters):
                parts.adapt(batch, self.program.adapters.slots_of(batch.adapters))
            changed = _NOTHING, _NOTHING
            if len(batch.updates.slots):
                places = self.inputs.places(batch.updates.slots, batch.updates.columns)
                changed = places, batch.updates.pages
            if len(parts.prompts) or len(batch.copies) or len(changed[0]) > ROOM:
                with torch.inference_mode():
                    return self._mixed(batch, parts, changed)
            logits = self._captured(batch, parts, changed)
            inside = self._tapped(batch.look) if batch.look else None
            self._places = parts.places
            return self._outcomes.flight(batch.sampled, logits, inside, prompts=False)
        except torch.OutOfMemoryError as error:
            raise UnspoolError(
                f"the GPU's memory is full: a step of {len(batch.tokens):,} tokens found no room "
                "beside weights and pages; leave less to keys and values (memory=...)"
            ) from error

    def _mixed(self, batch: StepBatch, parts: _Parts, changed: tuple[Ints, Ints]) -> Flight:
        """A step that is more than one captured step."""
        if len(changed[0]):
            self.inputs.update_now(*changed)
        if len(batch.copies):
            self._pages.copy(batch.copies)
        logits: list[Tensor] = []
        inside: Inside | None = None
        prompts = None
        if len(parts.prompts):  # first: the captured step overwrites what was picked before it
            wanted = np.concatenate((parts.sampled_prompts, parts.logits_of_prompts))
            prompts = self._prompts.prepared(
                batch, parts.prompt_rows, parts.prompts, wanted, self._resolved(batch, parts),
                parts.prompt_adapters,
            )  # fmt: skip
        if parts.count:
            found = self._captured(batch, parts, (_NOTHING, _NOTHING))
            logits += [] if found is None else [found]
            inside = self._tapped(batch.look) if batch.look else None
        if prompts is not None:
            looker = Looker(self.program, batch, batch.look) if batch.look else None
            found = self._prompts.run(prompts, looker)
            inside = looker.inside() if looker else None
            if parts.prompt_pick is not None:
                self._pick_prompts(found[: len(parts.prompt_pick.ints)], parts.prompt_pick)
            logits.append(found[len(parts.sampled_prompts) :])
        asked = torch.cat(logits) if len(batch.logits) else None
        if asked is not None and parts.mixed_logits is not None:
            asked = asked[to_device(parts.mixed_logits, self._device)]
        self._places = parts.places
        places = batch.sampled if parts.places is None else parts.places
        return self._outcomes.flight(places, asked, inside, prompts=len(parts.sampled_prompts) > 0)

    # -- captured steps ------------------------------------------------------------------------

    def _captured(
        self, batch: StepBatch, parts: _Parts, changed: tuple[Ints, Ints]
    ) -> Tensor | None:
        """Run the lines; gives the logits that were asked for of them."""
        lines, count = parts.lines, parts.count
        ends = batch.visible_end[lines]
        size, room = padded(count), min(room_for(largest(ends)), self.context)
        sampled, penalties = False, False
        picks = None
        if parts.line_pick is not None:
            pick, numbers = parts.line_pick, parts.sampled_lines
            sampled = any(pick.floats[:, 0].tolist())
            picks = (numbers, pick.floats, pick.ints)
            penalties = len(pick.history) > 0
            if penalties:
                if self.inputs.make_room_for_history(len(pick.history)):
                    self._picker.history = self.inputs.history
                    self._graphs.clear()
                self.inputs.send_history(self._resolved_tokens(pick.history))
        self.inputs.send(
            count, size, self._resolved_tokens(batch.tokens[lines]), batch.positions[lines], ends,
            parts.slots, changed, picks, parts.line_adapters,
        )  # fmt: skip
        fresh, picker = parts.fresh, self._picker
        adapted = parts.line_adapters is not None
        layers = batch.look.layers if batch.look else None
        taps = None if layers is None else self._taps_before(layers)

        def launch() -> None:
            self.program.step(size, room, fresh, adapted, taps)
            picker.launch(self.program.logits[:size], sampled=sampled, penalties=penalties)

        self._graphs.run((size, room, fresh, sampled, penalties, adapted, layers), launch)
        wanted = parts.logits_of_lines
        if not len(wanted):
            return None
        first, last = int(wanted[0]), int(wanted[-1])
        if last - first + 1 == len(wanted):
            return self.program.logits[first : last + 1]
        return self.program.logits[to_device(wanted, self._device)]

    def _taps_before(self, layers: tuple[int, ...]) -> Taps:
        found = self._taps.get(layers)
        if found is None:
            with torch.inference_mode(False):
                found = self._taps[layers] = Taps(layers, _LINES, self.program.weights)
        return found

    def _tapped(self, look: Look) -> Inside:
        """What the captured step has just left, where it lies: on the device."""
        assert look.layers is not None
        first, last = int(look.residuals[0]), int(look.residuals[-1]) + 1
        vectors: Any = self._taps[look.layers].of(first, last)
        if last - first != len(look.residuals):
            vectors = vectors[:, to_device(look.residuals - first, self._device)]
        return Inside(residuals=vectors)

    def _resolved_tokens(self, tokens: Ints) -> Ints:
        """-1 - n, the n-th pick of the step before, as the place of that pick on the device."""
        if self._places is None or smallest(tokens) >= 0:
            return tokens
        ahead, tokens = tokens < 0, tokens.copy()
        tokens[ahead] = -1 - self._places[-1 - tokens[ahead]]
        return tokens

    # -- prompts -------------------------------------------------------------------------------

    def _resolved(self, batch: StepBatch, parts: _Parts) -> Tensor:
        """The tokens of the prompts on the device."""
        tokens = to_device(self._resolved_tokens(batch.tokens[parts.prompts]), self._device)
        if smallest(batch.tokens[parts.prompts]) < 0:
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


def _beside_decode(weights: Weights) -> int:
    """How many tokens of prompts may be read while texts are written."""
    numbers = sum(matrix.rows * matrix.columns for matrix in weights.matrices())
    rate = _RATE * processors(weights.device)
    return max(512, min(_PREFILL, int(_WAIT * rate / (2 * numbers))))


class _Parts:
    """Which tokens of a step are lines of a captured step, and which belong to prompts."""

    lines: Ints | slice
    places: Ints | None  # of the picks, among those of lines and prompts; None: one a line
    mixed_logits: Ints | None
    line_adapters: Ints | None = None  # the slots of their adapters; None: nobody has one
    prompt_adapters: Ints | None = None

    def __init__(self, batch: StepBatch) -> None:
        # How far tokens see beyond themselves: nothing, in a text that is written left to right.
        causal = largest(batch.visible_end - batch.positions) == 1
        self.fresh = causal
        look = batch.look
        deep = look is not None and bool(look) and not look.is_tap
        if len(batch.tokens) == len(batch.slots) <= _LINES and not deep:
            self._only_lines(batch, batch.slots)  # one next token each: most steps are so
            return
        counts = np.diff(batch.starts)
        every, pick = np.arange(len(batch.tokens)), batch.pick
        short = counts <= _SHORT
        whole = bool(look) and (deep or not short.all())  # what is looked at is one run
        if whole or int(counts[short].sum()) > _LINES:
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
        places = np.empty(len(batch.sampled), np.int64)
        places[mine] = self.sampled_lines
        places[~mine] = _LINES + np.arange(len(self.sampled_prompts))
        self.places = places
        self.logits_of_lines = number[batch.logits[asked]]
        self.logits_of_prompts = number[batch.logits[~asked]]
        order = np.empty(len(batch.logits), np.int64)
        order[asked] = np.arange(asked.sum())
        order[~asked] = asked.sum() + np.arange((~asked).sum())
        self.mixed_logits = order

    def adapt(self, batch: StepBatch, slots: Ints) -> None:
        """Note the slots of the rows' adapters."""
        of_tokens = np.repeat(slots, np.diff(batch.starts))
        lines, prompts = of_tokens[self.lines], of_tokens[self.prompts]
        self.line_adapters = lines if lines.any() else None
        self.prompt_adapters = prompts if prompts.any() else None

    def _only_lines(self, batch: StepBatch, slots: Ints) -> None:
        self.lines, self.prompts = slice(None), _NOTHING
        self.count, self.slots = len(slots), slots
        self.sampled_lines, self.sampled_prompts = batch.sampled, _NOTHING
        self.line_pick, self.prompt_pick = batch.pick, None
        self.places = None if len(batch.sampled) == len(slots) else batch.sampled
        self.logits_of_lines, self.mixed_logits = batch.logits, None


def _chosen(pick: PickRows | None, rows: npt.NDArray[np.bool_]) -> PickRows | None:
    if pick is None or not rows.any():
        return None
    if rows.all():
        return pick
    ints = pick.ints[rows]
    seen = bool((ints[:, HISTORY_END] > ints[:, HISTORY_START]).any())
    return PickRows(pick.floats[rows], ints, pick.history if seen else _NOTHING)


def _check(batch: StepBatch, backend: CudaBackend) -> None:
    """A kernel that is told nonsense writes where it must not."""
    size, pages = len(batch.tokens), batch.updates.pages
    wrong = (
        size == 0
        or largest(batch.tokens) >= backend.vocab_size
        or smallest(batch.positions) < 0
        or largest(batch.visible_end) > backend.context
        or (len(pages) and not 0 <= smallest(pages) <= largest(pages) < backend.page_count)
    )
    if wrong:
        raise UnspoolError("the batch names a token, a position or a page that does not exist")
