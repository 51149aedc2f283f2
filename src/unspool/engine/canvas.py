"""The canvas of diffusion language models: a text whose end is filled in any order.

    kind = CanvasKind(mask_id=4, sight="block", block=32)
    canvas = open_canvas(engine, prompt_ids, 32, kind)
    logits = canvas.logits()          # of each of the 32 places, in one pass; see also `run_passes`
    canvas.set(5, token)              # also canvas.clear(5), and canvas.set(5, another)
    canvas.commit(32)                 # these places become final text
    canvas.append(32)                 # more masked places after them

A place is an index into the canvas; it has a token or the mask token. A canvas is a branch whose
end is provisional. A pass over it (a denoising step) is a task like any other: the engine runs it
in the same steps as ordinary texts, and may preempt it. Its commands do not wait for the step in
flight, so other texts keep flowing.

The text before the canvas is computed once and stays in the KV cache. With bidirectional attention
over the whole text nothing can stay; there `logits(first, last)` keeps the keys and values of the
last full pass for all other places, which is faster and approximate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeVar, Union, cast

import numpy as np

from unspool.backends.step import Details, Logits
from unspool.engine.engine import AwaitedTask, Engine
from unspool.engine.loop import Loop, concat_logits
from unspool.engine.scheduler import Scheduler
from unspool.engine.tree import Branch
from unspool.errors import ContextError, SettingsError, UnspoolError
from unspool.sampling.picker import SamplingRows

# -- A pass over a canvas: its places are computed in the engine's steps, beside ordinary texts


@dataclass(frozen=True, slots=True)
class PlacePicks:
    """What the backend sampled for the places of a canvas."""

    tokens: list[int]
    logprobs: list[float]  # by the model, without the mask token, before any sampling stage
    details: Details  # [places, 3]: entropy, margin, log-probability of the place's own token


class CanvasPass(AwaitedTask[Union[Logits, PlacePicks]]):  # noqa: UP007 - Logits may be a string
    """Computes a canvas from one position to its end, or to another position.

    Its result is the logits from the first position on or, with `pick_rows`, the tokens sampled
    for as many positions.

    Where only a span is computed, all other tokens keep the keys and values of the last full pass.
    If these are lost (by preemption, say), that full pass is computed again first.
    """

    __slots__ = ("engine", "full_pass_tokens", "output_start", "span", "tokens_to_restore")

    def __init__(
        self,
        engine: Engine,
        branch: Branch,
        first: int,
        stop: int | None = None,
        *,
        pick_rows: SamplingRows | None = None,
        output_start: int | None = None,
        full_pass_tokens: tuple[int, ...] | None = None,
        is_intact: bool = True,
    ) -> None:
        """Plan a pass from `first` to `stop`.

        Args:
            engine: Runs the pass.
            branch: The branch of the canvas.
            first: The first position to compute.
            stop: Where to end; None: at the end of the canvas.
            pick_rows: How to sample on the backend; None: logits are returned.
            output_start: The position of the first output, if that is not `first`.
            full_pass_tokens: All tokens at the last full pass, if only a span is computed.
            is_intact: Whether the keys and values of that pass are still there.
        """
        self.output_start = first if output_start is None else output_start
        super().__init__(branch, branch.length - self.output_start)
        self.pick_rows = pick_rows
        self.engine, self.full_pass_tokens, self.compute_end = engine, full_pass_tokens, stop
        self.decoding = True
        self.span = None if full_pass_tokens is None or stop is None else (first, stop)
        # The canvas's current tokens, while the last full pass is computed again.
        self.tokens_to_restore: list[int] | None = None
        if not is_intact:
            self._repeat_full_pass()

    @property
    def samples_on_host(self) -> bool:
        return self.pick_rows is None

    def begin(self, scheduler: Scheduler) -> None:
        if self.span is not None and self.tokens_to_restore is None:
            self.branch.num_computed = self.span[0]
        super().begin(scheduler)

    def preempted(self) -> None:
        if self.span is not None:
            self._repeat_full_pass()

    def _repeat_full_pass(self) -> None:
        """Compute the tokens of the last full pass first."""
        assert self.full_pass_tokens is not None
        if self.tokens_to_restore is None:
            self.tokens_to_restore = self.branch.tail.copy()
        self.compute_end, self.num_logits = None, 0
        self.branch.tail[:] = self.full_pass_tokens
        self.branch.num_computed = 0

    def _restore_tokens(self) -> None:
        assert self.tokens_to_restore is not None
        self.branch.tail[:], self.tokens_to_restore = self.tokens_to_restore, None

    def complete(self) -> None:
        if self.tokens_to_restore is not None and self.span is not None:
            self._restore_tokens()
            self.branch.num_computed, self.compute_end = self.span
            self.num_logits = self.branch.length - self.output_start
            return
        self.engine.scheduler.remove(self)
        if self.span is not None:
            self.branch.num_computed = self.branch.length
        if self.pick_rows is None:
            self.future.set_result(concat_logits(self.logits))
            return
        details = np.concatenate([np.empty((0, 3)), *self.details])
        tokens, logprobs = (
            [token for token, _ in self.picked],
            [chance for _, chance in self.picked],
        )
        self.future.set_result(PlacePicks(tokens, logprobs, details))

    def fail(self, error: BaseException) -> None:
        if self.tokens_to_restore is not None:
            self._restore_tokens()
            self.branch.num_computed = 0
        super().fail(error)


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasKind:
    """How a model attends to a canvas and to the text before it."""

    mask_id: int  # the mask token
    # Attention of the text before the canvas: causal, to everything, or to the token's block.
    sight: Literal["causal", "whole", "block"] = "whole"
    block: int = 0  # tokens of a block, where sight is "block"
    shifted: bool = False  # a token's logits predict the next token, not the token itself
    adapter: str | None = None  # LoRA adapter of the whole text
    canvas_adapter: str | None = None  # LoRA adapter of the canvas alone, if it has another


@dataclass(frozen=True, slots=True)
class CanvasSnapshot:
    """The state of a canvas, for `Canvas.restore`."""

    tokens: tuple[int, ...]  # with the text before the canvas
    start: int
    last_full_pass: tuple[int, ...] | None


def open_canvas(engine: Engine, text: Sequence[int], length: int, kind: CanvasKind) -> Canvas:
    """Open a canvas of `length` masked places after a text."""
    engine.check_head()
    _check_room(engine, len(text), length)
    if engine.tree.states is not None and kind.sight != "causal":
        raise SettingsError(
            "a model with recurrent layers reads from left to right; its canvas needs causal sight"
        )
    num_final = 0 if kind.sight == "whole" else len(text)
    if kind.sight == "block":
        if kind.block < 1:
            raise SettingsError(f"block must be >= 1, got {kind.block}")
        num_final -= num_final % kind.block  # an incomplete block is computed with the canvas
    tree, number = engine.tree, engine.adapters.number

    def begin() -> Branch:
        block = kind.block if kind.sight == "block" else 0
        canvas_adapter = None if kind.canvas_adapter is None else number(kind.canvas_adapter)
        branch = tree.open(text[:num_final], adapter=number(kind.adapter), block=block)
        branch.owner, branch.canvas_adapter = engine, canvas_adapter
        tree.append(branch, [*text[num_final:], *[kind.mask_id] * length], provisional=True)
        return branch

    return Canvas(engine, engine.loop.call(begin, at_rest=False), length, kind)


class Canvas:
    """Places after a text, each with a token or the mask token. For one thread at a time.

    Attributes:
        engine: The engine that computes the canvas.
        branch: The branch of the token tree that holds text and canvas.
        kind: How the canvas is computed: block, mask token, attention.
        start: The position of the first place.
    """

    def __init__(self, engine: Engine, branch: Branch, length: int, kind: CanvasKind) -> None:
        self.engine, self.branch, self.kind = engine, branch, kind
        self.start = branch.length - length  # the position of the first place
        self._places = branch.tail[len(branch.tail) - length :]
        self._changed = False  # since the last pass
        self._logits: Logits | None = None  # of all places, from the last pass; None: outdated
        self._first_logits: Logits | None = None  # of the first place, from the final text alone
        # With attention to the whole text: its tokens at the last full pass, and the places that
        # were computed alone since.
        self._last_full_pass: tuple[int, ...] | None = None
        self._window: tuple[int, int] | None = None
        self._finalizer = weakref.finalize(self, _close, engine.loop, branch)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<Canvas of {len(self)} places at {self.start}, {len(self.masked)} masked>"

    # -- tokens ---------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """The token of each place; the mask token where there is none yet."""
        return self._places.copy()

    @property
    def masked(self) -> list[int]:
        """The masked places, from left to right."""
        return [n for n, token in enumerate(self._places) if token == self.kind.mask_id]

    def set(self, place: int, token: int) -> None:
        """Set the token of a place; it may have one already."""
        if not 0 <= place < len(self._places):
            raise SettingsError(f"place must be from 0 to {len(self._places) - 1}, got {place}")
        if not 0 <= token < self.engine.backend.vocab_size:
            raise SettingsError(
                f"token {token} is not in the vocabulary, which goes from 0 to "
                f"{self.engine.backend.vocab_size - 1}"
            )
        if self._places[place] != token:
            self._places[place], self._changed, self._logits = token, True, None

    def clear(self, place: int) -> None:
        """Mask a place again."""
        self.set(place, self.kind.mask_id)

    # -- logits ---------------------------------------------------------------------------------

    def logits(self, first: int | None = None, last: int | None = None) -> Logits:
        """Run a pass over the canvas and return the logits of each place, [places, vocabulary].

        With attention to the whole text, a pass may compute only the places from `first` to before
        `last`, and return their logits. All others keep the keys and values of the last full pass:
        faster, and approximate.
        """
        window = None if first is None else (first, last)
        return cast(Logits, run_passes([PassRequest(self, window)])[0])

    def next_logits(self) -> Logits | None:
        """Return the logits of the first place from the final text alone, [1, vocabulary].

        None if the model predicts each place at its own position, or no text is final.
        """
        return cast("Logits | None", run_first_place_passes([(self, None)])[0])

    @property
    def text_predicts_first(self) -> bool:
        """Whether the last token of the final text predicts the first place."""
        begin = self.branch.provisional
        num_final = self.branch.length if begin is None else begin
        return self.kind.shifted and 0 < self.start == num_final

    # -- changes --------------------------------------------------------------------------------

    def commit(self, count: int) -> None:
        """Make the first `count` places final text; they are computed again as such."""
        if not 0 <= count <= len(self._places):
            raise SettingsError(f"cannot commit {count} of {len(self._places)} places")
        if self.kind.mask_id in self._places[:count]:
            place = self._places.index(self.kind.mask_id)
            raise SettingsError(f"place {place} is still masked; set it before you commit it")
        end = self.start + count
        self._call(lambda: self._commit(end))
        del self._places[:count]
        self.start, self._logits, self._first_logits = end, None, None

    def append(self, count: int) -> None:
        """Append `count` masked places."""
        _check_room(self.engine, self.start + len(self._places), count)
        masks = [self.kind.mask_id] * count

        def append() -> None:
            self._write()
            self.engine.tree.append(self.branch, masks, provisional=True)

        self._call(append)
        self._places += masks
        self._logits, self._last_full_pass = None, None

    def fork(self) -> Canvas:
        """Return a copy of this canvas; both share the computed text before it."""

        def fork() -> Branch:
            self._write()
            return self.engine.tree.fork(self.branch)

        other = Canvas(self.engine, self._call(fork), len(self._places), self.kind)
        other._logits, other._first_logits = self._logits, self._first_logits
        other._last_full_pass = self._last_full_pass
        return other

    def snapshot(self) -> CanvasSnapshot:
        """Return the canvas's tokens, for `restore`."""
        text = self._call(lambda: self.branch.tokens)[: self.start]
        return CanvasSnapshot((*text, *self._places), self.start, self._last_full_pass)

    def restore(self, snapshot: CanvasSnapshot) -> None:
        """Return to a snapshot of this canvas, or of one that it was forked from."""
        self._call(lambda: self._restore(list(snapshot.tokens), snapshot.start))
        self._places = list(snapshot.tokens[snapshot.start :])
        self.start, self._last_full_pass = snapshot.start, snapshot.last_full_pass
        self._logits = self._first_logits = self._window = None

    def close(self) -> None:
        """Release the pages. Safe to call twice."""
        if self._finalizer.detach() is not None:
            self.engine.release(self.branch)

    def __enter__(self) -> Canvas:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- on the engine's thread -----------------------------------------------------------------

    def _call(self, command: Callable[[], Result]) -> Result:
        """Run a command on the branch, which must be idle: other texts' steps stay in flight."""

        def run() -> Result:
            self.engine.scheduler.check_idle(self.branch)
            return command()

        return self.engine.loop.call(run, at_rest=False)

    def _write(self) -> None:
        """Copy changed places to the branch."""
        if self._changed:
            self.engine.tree.replace(self.branch, self.start, self._places)
            self._changed = False

    def _num_final(self, end: int) -> int:
        """Return how many of the first `end` tokens stay in the KV cache as final text."""
        return 0 if self.kind.sight == "whole" else self.branch.whole_blocks(end)

    def _commit(self, end: int) -> None:
        tree, branch = self.engine.tree, self.branch
        self._write()
        if (
            branch.block
        ):  # a final token attends to its block too, so its keys and values stay valid
            if branch.canvas_adapter is not None and branch.provisional is not None:
                branch.num_computed = min(
                    branch.num_computed, branch.provisional
                )  # ... by another adapter
            tree.commit(branch, self._num_final(end))
        elif self.kind.sight == "causal":
            self._restore(branch.tokens, end)

    def _restore(self, tokens: list[int], start: int) -> None:
        """Set the tokens of the branch; the canvas starts at `start`."""
        tree, branch, num_final = self.engine.tree, self.branch, self._num_final(start)
        num_known = branch.length if branch.provisional is None else branch.provisional
        num_known = min(num_known, num_final)
        pairs = enumerate(zip(branch.tokens[:num_known], tokens, strict=False))
        num_same = next((n for n, (token, other) in pairs if token != other), num_known)
        tree.rewind(branch, num_same)
        tree.append(branch, tokens[num_same:num_final])
        tree.append(branch, tokens[num_final:], provisional=True)
        self._changed = False


def _close(loop: Loop, branch: Branch) -> None:
    """Release the branch of a canvas that was garbage-collected."""

    def close() -> None:
        task = loop.scheduler.task_of(branch)
        if task is not None:
            loop.fail(task, UnspoolError("the canvas was closed"))
        loop.tree.close(branch)

    if loop.alive:
        loop.post(close, at_rest=False)


def _check_room(engine: Engine, before: int, length: int) -> None:
    if before + length > engine.backend.context:
        raise ContextError(
            f"{before:,} tokens and {length:,} places after them are more than the model's "
            f"context, which holds {engine.backend.context:,}; use fewer places"
        )
    if before + length == 0:
        raise SettingsError("the canvas is empty; give it places, or text before it")
    engine.scheduler.check_fits(before + length)


# -- passes -------------------------------------------------------------------------------------


Window = tuple[int, int | None] | None
"""The places from the first to before the second (None: the end); None: all places."""


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A pass over a canvas, and what it returns."""

    canvas: Canvas
    window: Window = None  # see `Canvas.logits`
    # How the backend samples the places from `first_place` on; None: the logits are returned.
    sampling: SamplingRows | None = None
    first_place: int = 0


def run_passes(requests: Sequence[PassRequest]) -> list[Logits | PlacePicks]:
    """Run passes over several canvases in the same steps; return the logits of each, or what was
    sampled."""
    outputs: dict[int, Logits | PlacePicks] = {}
    passes: dict[int, CanvasPass] = {}

    def plan() -> list[CanvasPass]:
        for request in requests:
            request.canvas.engine.scheduler.check_idle(request.canvas.branch)
            if not len(request.canvas):
                raise SettingsError("the canvas has no places; append some")
        for index, request in enumerate(requests):
            logits = request.canvas._logits
            if logits is not None and request.window is None and request.sampling is None:
                outputs[index] = logits
            else:
                passes[index] = _plan_pass(request)
        return list(passes.values())

    if not requests:
        return []
    results = requests[0].canvas.engine.run_tasks(plan)
    for (index, canvas_pass), result in zip(passes.items(), results, strict=True):
        if not isinstance(result, PlacePicks):
            request = requests[index]
            result = _logits_of_places(request.canvas, canvas_pass, result, request.window)
        outputs[index] = result
    return [outputs[index] for index in range(len(requests))]


def run_first_place_passes(
    requests: Sequence[tuple[Canvas, SamplingRows | None]],
) -> list[Logits | PlacePicks | None]:
    """Predict the first place of several canvases from their final text alone, in the same steps.

    Returns `Canvas.next_logits` of each canvas or, with settings, what the backend sampled.
    """
    passes: dict[Canvas, CanvasPass] = {}

    def plan() -> list[CanvasPass]:
        for canvas, rows in requests:
            canvas.engine.scheduler.check_idle(canvas.branch)
            canvas._write()
            is_known = canvas._first_logits is not None and rows is None
            if canvas.text_predicts_first and not is_known:
                first, end = canvas.start - 1, canvas.start
                passes[canvas] = CanvasPass(
                    canvas.engine, canvas.branch, first, end, pick_rows=rows
                )
        return list(passes.values())

    picks = dict[Canvas, PlacePicks]()
    if requests:
        results = requests[0][0].engine.run_tasks(plan)
        for canvas, result in zip(passes, results, strict=True):
            if isinstance(result, PlacePicks):
                picks[canvas] = result
            else:
                canvas._first_logits = result
    return [
        canvas._first_logits if rows is None else picks.get(canvas) for canvas, rows in requests
    ]


def _plan_pass(request: PassRequest) -> CanvasPass:
    """Return the pass that computes the outputs of all places, or of those in a window."""
    canvas, window, rows = request.canvas, request.window, request.sampling
    branch, kind = canvas.branch, canvas.kind
    first, last = (0, len(canvas)) if window is None else _check_window(canvas, window)
    is_intact = branch.num_computed == branch.length and canvas._window in (None, (first, last))
    canvas._write()
    begin = canvas.start + first
    if kind.shifted and begin and (canvas._first_logits is None or rows is not None):
        begin -= 1
    output_start = None
    if rows is not None:
        output_start = canvas.start + request.first_place - kind.shifted
        begin = output_start if window is None else begin
    if window is None or canvas._last_full_pass is None:
        if kind.sight == "whole":  # a full pass: afterwards nothing is approximate
            canvas._last_full_pass, branch.num_computed = (*branch.tail,), 0
        canvas._window = None
        return CanvasPass(canvas.engine, branch, begin, pick_rows=rows, output_start=output_start)
    canvas._window = (first, last)
    return CanvasPass(
        canvas.engine,
        branch,
        begin,
        canvas.start + last,
        pick_rows=rows,
        output_start=output_start,
        full_pass_tokens=canvas._last_full_pass,
        is_intact=is_intact,
    )


def _check_window(canvas: Canvas, window: tuple[int, int | None]) -> tuple[int, int]:
    first, last = window[0], len(canvas) if window[1] is None else window[1]
    if canvas.kind.sight != "whole":
        raise SettingsError(
            "a pass over some places alone needs a model with attention to the whole text; other "
            "models keep the text before the canvas in the KV cache anyway"
        )
    if not 0 <= first < last <= len(canvas):
        raise SettingsError(
            f"places must satisfy 0 <= first < last <= {len(canvas)}, got {first} and {last}"
        )
    return first, last


def _logits_of_places(
    canvas: Canvas, canvas_pass: CanvasPass, rows: Logits, window: Window
) -> Logits:
    """Select the rows of a pass that predict the places."""
    first, last = (0, len(canvas)) if window is None else _check_window(canvas, window)
    shifted = canvas.kind.shifted
    position = canvas.start + first - shifted  # whose row predicts the first place
    if canvas_pass.span is not None:
        base = canvas_pass.span[0]
    else:
        base = canvas.branch.length - canvas_pass.num_logits
    if shifted and canvas._first_logits is not None:
        rows = concat_logits([canvas._first_logits, rows])
        base -= 1
    elif shifted and canvas.text_predicts_first:
        canvas._first_logits = rows[:1]
    if position < 0:  # the first token of a text is predicted at its own position
        rows, position = concat_logits([rows[:1], rows]), 0
    logits = rows[position - base : position - base + last - first]
    if window is None:
        canvas._logits = logits
    return logits
