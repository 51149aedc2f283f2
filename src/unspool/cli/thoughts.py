"""An answer with thoughts on the command line: dimmed on a screen, left out of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from unspool.text.reasoning import ReasoningPiece, make_output_parser
from unspool.text.tools.parser import TextPiece

if TYPE_CHECKING:
    from unspool.engine.generation import Generation
    from unspool.engine.reasoning import ReasoningSpec
    from unspool.engine.results import Step

_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"


def show_answer(steps: Iterable[Step], generation: Generation, thinking: ReasoningSpec) -> None:
    """Text as it comes; what a guard may take back goes into a pipe only when it is final."""
    watched, guarded = sys.stdout.isatty(), generation.request.guards is not None
    screen = _Screen(generation, thinking, shown=watched or not guarded)
    try:
        for step in steps:
            if step.retracts and watched:
                sys.stdout.write(f"\n⟲ {step.retracts} tokens taken back\n")
                screen = _Screen(generation, thinking, shown=True)
                for earlier in generation.steps[:-1]:
                    screen.take(earlier)
            screen.take(step)
    finally:
        screen.finish()
        if guarded and not watched:
            sys.stdout.write(generation.answer)
        if watched or not generation.answer.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()


class _Screen:
    """What was read so far, and in which colour it stands there."""

    def __init__(self, generation: Generation, thinking: ReasoningSpec, *, shown: bool) -> None:
        self._reader = make_output_parser(thinking.format, thinking.start, None)
        self._generation, self._shown, self._is_dim = generation, shown, False

    def take(self, step: Step) -> None:
        assert self._reader is not None
        self._write(self._reader.push(step.token, step.text))

    def finish(self) -> None:
        assert self._reader is not None
        self._write(self._reader.finish())
        if self._is_dim:
            sys.stdout.write(_NORMAL)

    def _write(self, pieces: Iterable[object]) -> None:
        if not self._shown:
            return
        for piece in pieces:
            if isinstance(piece, ReasoningPiece) and sys.stdout.isatty():
                sys.stdout.write(piece.text if self._is_dim else f"{_DIM}{piece.text}")
                self._is_dim = True
            elif isinstance(piece, TextPiece):
                if self._is_dim:
                    sys.stdout.write(f"\n[{cost(self._generation)}]{_NORMAL}\n\n")
                    self._is_dim = False
                sys.stdout.write(piece.text)
        sys.stdout.flush()


def cost(generation: Generation) -> str:
    """What the thoughts took."""
    usage = generation.usage
    return f"thought: {usage.reasoning_tokens} tokens, {usage.reasoning_seconds:.1f} s"


def unfinished(generation: Generation) -> str | None:
    """A remark where there is a thought and no answer."""
    if generation.answer.strip() or not generation.reasoning:
        return None
    return (
        f"the text ended ({generation.finish_reason}) before the model was done thinking; give it "
        "more tokens (-n), or close its thoughts earlier (--think-budget, --no-think)"
    )
