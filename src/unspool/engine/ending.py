"""The one place that says what a token shows of its text, and whether the text ends with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from unspool.engine.endless import forgotten, in_view
from unspool.errors import ContextError
from unspool.text.tokenizer.stream import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop, and what to record."""

    max_tokens: int = 256
    context: int
    end_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    # Strings behind which a text pauses, and which stay in it; only what is new is looked at. A
    # search sets them for one piece of a text: no trace saves them.
    pauses: tuple[str, ...] = field(default=(), compare=False)
    sample: int = 0  # which of several samples with one seed
    top: int = 0  # candidates to record at each step
    explain: bool = False  # record what each sampling stage did
    # Go on beyond the context, with so many first tokens kept in view; None: end there.
    endless: int | None = None

    def room(self, prompt_length: int) -> int:
        """How many tokens may follow a prompt."""
        if self.endless is not None:
            return self.max_tokens
        return max(0, min(self.max_tokens, self.context - prompt_length))

    def forgotten(self, length: int) -> int:
        """How many tokens of a text of so many are out of view."""
        return 0 if self.endless is None else forgotten(length, self.context, self.endless)

    def in_view(self, tokens: list[int]) -> list[int]:
        """Those tokens of a text that the model sees when it writes the next one."""
        return tokens if self.endless is None else in_view(tokens, self.context, self.endless)


def check_fits(length: int, context: int, longest: int = 0) -> None:
    """Refuse a prompt that is longer than the context; `longest`: what the model can be loaded
    with."""
    if length > context:
        longer = f", or load the model with context={longest}" if longest > context else ""
        raise ContextError(
            f"the prompt has {length:,} tokens and the model's context holds {context:,}; "
            f"shorten the prompt{longer}",
            num_tokens=length,
            context=context,
        )


class Ending:
    """A text as it grows: what can be shown of it, and why it ends."""

    __slots__ = ("_limits", "_new", "_prompt", "text")

    def __init__(self, limits: Limits, prompt_length: int, text: TextStream | None = None) -> None:
        self._limits, self._prompt = limits, prompt_length
        self.text = TextStream(limits.stop) if text is None else text
        self._new = b""  # what was pushed, where a pause is looked for in it

    def copy(self) -> Ending:
        other = Ending(self._limits, self._prompt, self.text.copy())
        other._new = self._new
        return other

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self.text.stopped

    def push(
        self, token: int, piece: bytes, length: int, must_end: bool = False
    ) -> tuple[str, str | None]:
        """What can be shown once this token is there, and why the text ends with it, if it does.

        `length` is that of the whole text, this token included; `must_end` says that a grammar
        allows nothing more. The end token itself is never shown.
        """
        limits = self._limits
        if token in limits.end_ids:
            return self.text.push(b""), "stop"
        shown = self.text.push(piece)
        if self.text.stopped is not None or must_end:
            return shown, "stop"
        if length - self._prompt >= limits.max_tokens:
            return shown, "length"
        if length >= limits.context and limits.endless is None:
            return shown, "context"
        if limits.pauses and self._pauses(piece):
            return shown, "pause"
        return shown, None

    def _pauses(self, piece: bytes) -> bool:
        """Whether one of the strings is complete with this piece. Space before the first word is
        no piece of text that anybody would pause behind."""
        pauses = [pause.encode() for pause in self._limits.pauses]
        fresh = self._new + piece
        if not self._new:
            fresh = fresh.lstrip()
        complete = any(pause in fresh for pause in pauses)
        # Only so much is kept that a pause can be found which begins in it, but never nothing.
        self._new = fresh[-max(map(len, pauses)) :]
        return complete

    def finish(self) -> str:
        """What was held back until it was certain that the text ends here."""
        return self.text.finish()
