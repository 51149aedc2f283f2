"""The canvas: a text whose end is filled in any order.

    kind = CanvasKind(mask_id=4, sight="block", block=32)
    canvas = open_canvas(engine, prompt_ids, 32, kind)
    logits = canvas.logits()          # what the model says of each of the 32 places, in one pass
    canvas.set(5, token)              # also canvas.clear(5), and canvas.set(5, another)
    canvas.commit(32)                 # these places are text now, and computed as text
    canvas.append(32)                 # more places behind them

A canvas is a branch whose end is provisional. A pass over it is a task like any other: the engine
runs it in the same steps as ordinary texts, and may preempt it. What stands before the canvas is
kept as the model keeps finished text, so it is computed once. Only a model whose every token sees
the whole text has nothing to keep. It can be told to keep it all the same, as of the last whole
pass (`logits(first, last)`): that is quicker, and approximate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeVar

from unspool.backends.step import Logits
from unspool.engine.branch import Branch
from unspool.engine.canvas_pass import Pass
from unspool.engine.engine import Engine
from unspool.engine.loop import Loop
from unspool.engine.picking import joined
from unspool.errors import ContextError, SettingsError, UnspoolError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasKind:
    """How a model sees a canvas, and what stands before it."""

    mask_id: int  # what stands where nothing is known yet
    # The text before the canvas: each token sees what is before it; everything; its block.
    sight: Literal["causal", "whole", "block"] = "whole"
    block: int = 0  # tokens of a block, where sight is "block"
    shifted: bool = False  # the vector of a token guesses the one behind it
    adapter: str | None = None  # what all is computed with
    twin: str | None = None  # what the canvas alone is computed with, if that is another


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A canvas as it was, to come back to."""

    tokens: tuple[int, ...]  # all of them, the text before the canvas included
    start: int
    seen: tuple[int, ...] | None


def open_canvas(engine: Engine, text: Sequence[int], length: int, kind: CanvasKind) -> Canvas:
    """So many masked places behind a text."""
    engine.check_head()
    _check_room(engine, len(text), length)
    if engine.tree.states is not None and kind.sight != "causal":
        raise SettingsError(
            "a model with recurrent layers reads from left to right; what it fills in any order it "
            "can only see with causal sight"
        )
    held = 0 if kind.sight == "whole" else len(text)
    if kind.sight == "block":
        if kind.block < 1:
            raise SettingsError(f"a block of {kind.block} tokens holds nothing; give one of 1 up")
        held -= held % kind.block  # a block that is not whole is computed with the canvas
    tree, number = engine.tree, engine.adapters.number

    def begin() -> Branch:
        block = kind.block if kind.sight == "block" else 0
        twin = None if kind.twin is None else number(kind.twin)
        branch = tree.open(text[:held], adapter=number(kind.adapter), block=block)
        branch.owner, branch.twin = engine, twin
        tree.append(branch, [*text[held:], *[kind.mask_id] * length], provisional=True)
        return branch

    return Canvas(engine, engine.call(begin), length, kind)


class Canvas:
    """Places behind a text, each with a token or the mask."""

    def __init__(self, engine: Engine, branch: Branch, length: int, kind: CanvasKind) -> None:
        self.engine, self.branch, self.kind = engine, branch, kind
        self.start = branch.length - length  # the position of the first place
        self._places = branch.tail[len(branch.tail) - length :]
        self._changed = False  # since the last pass
        self._found: Logits | None = None  # what the last pass over all places gave
        self._ahead: Logits | None = None  # what the text alone says of the first place
        # Of a text that is seen as a whole: its tokens at the last pass over all of it, and which
        # places alone were computed since.
        self._seen: tuple[int, ...] | None = None
        self._window: tuple[int, int] | None = None
        self._end = weakref.finalize(self, _close, engine.loop, branch)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<Canvas of {len(self)} places at {self.start}, {len(self.masked)} masked>"

    # -- what stands there ----------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """The token of each place; the mask where there is none yet."""
        return self._places.copy()

    @property
    def masked(self) -> list[int]:
        """The places without a token, from left to right."""
        return [n for n, token in enumerate(self._places) if token == self.kind.mask_id]

    def set(self, place: int, token: int) -> None:
        """Put a token in a place, also where there is one already."""
        if not 0 <= place < len(self._places):
            raise SettingsError(f"there is no place {place}: the canvas has {len(self._places)}")
        if not 0 <= token < self.engine.backend.vocab_size:
            raise SettingsError(
                f"token {token} is not in the vocabulary, which goes from 0 to "
                f"{self.engine.backend.vocab_size - 1}"
            )
        if self._places[place] != token:
            self._places[place], self._changed, self._found = token, True, None

    def clear(self, place: int) -> None:
        """Take the token of a place back."""
        self.set(place, self.kind.mask_id)

    # -- what the model says --------------------------------------------------------------------

    def logits(self, first: int | None = None, last: int | None = None) -> Logits:
        """What the model says of each place, [places, vocabulary], in one pass.

        Where the model sees the whole text at once, a pass may compute the places from `first` to
        before `last` alone, and gives their logits. All others keep the keys and values that they
        had in the last whole pass: quicker, and approximate.
        """
        return run_passes([(self, None if first is None else (first, last))])[0]

    def next_logits(self) -> Logits | None:
        """What the finished text alone says of the first place, [1, vocabulary]; None if it says
        nothing of it (a place is guessed by its own vector, or nothing is finished)."""
        return first_guesses([self])[0]

    # -- the verbs ------------------------------------------------------------------------------

    def commit(self, count: int) -> None:
        """The first places become text; they are computed once more, as finished text is."""
        if not 0 <= count <= len(self._places):
            raise SettingsError(f"cannot commit {count} of {len(self._places)} places")
        if self.kind.mask_id in self._places[:count]:
            place = self._places.index(self.kind.mask_id)
            raise SettingsError(f"place {place} is still masked; set it before it is committed")
        end = self.start + count
        self._call(lambda: self._commit(end))
        del self._places[:count]
        self.start, self._found, self._ahead = end, None, None

    def append(self, count: int) -> None:
        """More masked places at the end."""
        _check_room(self.engine, self.start + len(self._places), count)
        masks = [self.kind.mask_id] * count

        def append() -> None:
            self._write()
            self.engine.tree.append(self.branch, masks, provisional=True)

        self._call(append)
        self._places += masks
        self._found, self._seen = None, None

    def fork(self) -> Canvas:
        """Another canvas as this one is; what is computed of the text is shared."""

        def fork() -> Branch:
            self._write()
            return self.engine.tree.fork(self.branch)

        other = Canvas(self.engine, self._call(fork), len(self._places), self.kind)
        other._found, other._ahead, other._seen = self._found, self._ahead, self._seen
        return other

    def snapshot(self) -> Snapshot:
        """What `restore` comes back to."""
        before = self._call(lambda: self.branch.tokens)[: self.start]
        return Snapshot((*before, *self._places), self.start, self._seen)

    def restore(self, snapshot: Snapshot) -> None:
        """Be as at a snapshot of this canvas, or of one that it was forked from."""
        self._call(lambda: self._restore(list(snapshot.tokens), snapshot.start))
        self._places = list(snapshot.tokens[snapshot.start :])
        self.start, self._seen = snapshot.start, snapshot.seen
        self._found = self._ahead = self._window = None

    def close(self) -> None:
        """Give the pages back; twice is once."""
        if self._end.detach() is not None:
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
        def carry_out() -> Result:
            self.engine.scheduler.check_idle(self.branch)
            return command()

        return self.engine.call(carry_out)

    def _write(self) -> None:
        """Bring what was set and cleared to the branch."""
        if self._changed:
            self.engine.tree.replace(self.branch, self.start, self._places)
            self._changed = False

    def _held(self, end: int) -> int:
        """How much of a text of so many tokens is kept as finished text."""
        return 0 if self.kind.sight == "whole" else self.branch.whole_blocks(end)

    def _commit(self, end: int) -> None:
        tree, branch = self.engine.tree, self.branch
        self._write()
        if branch.block:  # finished or not, a token sees its block: what is computed stays right
            if branch.twin is not None and branch.provisional is not None:  # ... by the same model
                branch.computed = min(branch.computed, branch.provisional)
            tree.commit(branch, self._held(end))
        elif self.kind.sight == "causal":
            self._restore(branch.tokens, end)

    def _restore(self, tokens: list[int], start: int) -> None:
        """Let the branch hold these tokens, the canvas beginning at `start`."""
        tree, branch, held = self.engine.tree, self.branch, self._held(start)
        before = branch.length if branch.provisional is None else branch.provisional
        known = min(before, held)
        same = zip(branch.tokens[:known], tokens, strict=False)
        kept = next((n for n, (one, other) in enumerate(same) if one != other), known)
        tree.rewind(branch, kept)
        tree.append(branch, tokens[kept:held])
        tree.append(branch, tokens[held:], provisional=True)
        self._changed = False


def _close(loop: Loop, branch: Branch) -> None:
    """Nobody holds the canvas any more."""

    def close() -> None:
        task = loop.scheduler.task_of(branch)
        if task is not None:
            loop.fail(task, UnspoolError("the canvas was closed"))
        loop.tree.close(branch)

    if loop.alive:
        loop.tell(close)


def _check_room(engine: Engine, before: int, length: int) -> None:
    if before + length > engine.backend.context:
        raise ContextError(
            f"{before:,} tokens and {length:,} places behind them are more than the model's "
            f"context, which holds {engine.backend.context:,}; ask for fewer"
        )
    if before + length == 0:
        raise SettingsError("the canvas is empty; give it places, or text before it")
    engine.scheduler.check_fits(before + length)


# -- passes -------------------------------------------------------------------------------------


Window = tuple[int, int | None] | None


def run_passes(wanted: Sequence[tuple[Canvas, Window]]) -> list[Logits]:
    """`Canvas.logits` of several canvases, computed in the same steps."""
    found: dict[int, Logits] = {}
    runs: dict[int, Pass] = {}

    def plan() -> list[Pass]:
        for canvas, _ in wanted:
            canvas.engine.scheduler.check_idle(canvas.branch)
            if not len(canvas):
                raise SettingsError("the canvas has no places; append some")
        for number, (canvas, window) in enumerate(wanted):
            if canvas._found is not None and window is None:
                found[number] = canvas._found
            else:
                runs[number] = _planned(canvas, window)
        return list(runs.values())

    if not wanted:
        return []
    results = wanted[0][0].engine.run_tasks(plan)
    for (number, run), rows in zip(runs.items(), results, strict=True):
        canvas, window = wanted[number]
        found[number] = _of_places(canvas, run, rows, window)
    return [found[number] for number in range(len(wanted))]


def first_guesses(canvases: Sequence[Canvas]) -> list[Logits | None]:
    """`Canvas.next_logits` of several canvases, computed in the same steps."""
    runs: dict[Canvas, Pass] = {}

    def plan() -> list[Pass]:
        for canvas in canvases:
            canvas.engine.scheduler.check_idle(canvas.branch)
            canvas._write()
            if canvas._ahead is None and _is_guessed_ahead(canvas):
                runs[canvas] = Pass(canvas.engine, canvas.branch, canvas.start - 1, canvas.start)
        return list(runs.values())

    if canvases:
        results = canvases[0].engine.run_tasks(plan)
        for canvas, logits in zip(runs, results, strict=True):
            canvas._ahead = logits
    return [canvas._ahead for canvas in canvases]


def _is_guessed_ahead(canvas: Canvas) -> bool:
    """Whether a vector of the finished text guesses the first place."""
    begin = canvas.branch.provisional
    finished = canvas.branch.length if begin is None else begin
    return canvas.kind.shifted and 0 < canvas.start == finished


def _planned(canvas: Canvas, window: Window) -> Pass:
    """The pass that gives the logits of all places, or of those in a window."""
    branch, kind = canvas.branch, canvas.kind
    first, last = (0, len(canvas)) if window is None else _checked(canvas, window)
    intact = branch.computed == branch.length and canvas._window in (None, (first, last))
    canvas._write()
    begin = canvas.start + first
    if kind.shifted and begin and canvas._ahead is None:
        begin -= 1
    if window is None or canvas._seen is None:
        if kind.sight == "whole":  # afterwards nothing is approximate any more
            canvas._seen, branch.computed = (*branch.tail,), 0
        canvas._window = None
        return Pass(canvas.engine, branch, begin)
    canvas._window = (first, last)
    end = canvas.start + last
    return Pass(canvas.engine, branch, begin, end, seen=canvas._seen, intact=intact)


def _checked(canvas: Canvas, window: tuple[int, int | None]) -> tuple[int, int]:
    first, last = window[0], len(canvas) if window[1] is None else window[1]
    if canvas.kind.sight != "whole":
        raise SettingsError(
            "only a model that sees the whole text has passes over some places alone; this one "
            "keeps what stands before the canvas anyway"
        )
    if not 0 <= first < last <= len(canvas):
        raise SettingsError(f"there are no places {first} to {last} of {len(canvas)}")
    return first, last


def _of_places(canvas: Canvas, run: Pass, rows: Logits, window: Window) -> Logits:
    """Which of a pass's rows speak of which places."""
    first, last = (0, len(canvas)) if window is None else _checked(canvas, window)
    kept = canvas.kind.shifted
    begun = canvas.start + first - kept  # the position whose row speaks of the first place
    base = run.span[0] if run.span is not None else canvas.branch.length - run.wanted
    if kept and canvas._ahead is not None:
        rows = joined([canvas._ahead, rows])
        base -= 1
    elif kept and _is_guessed_ahead(canvas):
        canvas._ahead = rows[:1]
    if begun < 0:  # the very first token of a text is guessed by its own place
        rows, begun = joined([rows[:1], rows]), 0
    given = rows[begun - base : begun - base + last - first]
    if window is None:
        canvas._found = given
    return given
