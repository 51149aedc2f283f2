"""When a text ends, and which part of it can be shown already."""

from __future__ import annotations

from dataclasses import dataclass, field

from unspool.engine.endless import num_truncated, visible_tokens
from unspool.errors import ContextError
from unspool.text.tokenizer.stream import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop, and what to record."""

    max_tokens: int = 256
    context: int
    end_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    # Strings after which a text pauses, and which stay in it; only new text is searched. A search
    # sets them for one part of a text: traces do not save them.
    pauses: tuple[str, ...] = field(default=(), compare=False)
    sample: int = 0  # index among several samples with one seed
    top: int = 0  # candidates to record at each step
    explain: bool = False  # record what each sampling stage did
    # Continue beyond the context with this many first tokens kept visible; None: end there.
    endless: int | None = None

    def room(self, prompt_length: int) -> int:
        """Return how many tokens may follow a prompt."""
        if self.endless is not None:
            return self.max_tokens
        return max(0, min(self.max_tokens, self.context - prompt_length))

    def num_truncated(self, length: int) -> int:
        """Return how many of a text's `length` tokens the model no longer sees."""
        return 0 if self.endless is None else num_truncated(length, self.context, self.endless)

    def visible_tokens(self, tokens: list[int]) -> list[int]:
        """Return the tokens that the model sees when it writes the next one."""
        if self.endless is None:
            return tokens
        return visible_tokens(tokens, self.context, self.endless)


def check_fits(length: int, context: int, max_context: int = 0) -> None:
    """Raise ContextError for a prompt longer than the context.

    `max_context` is the longest context that the model can be loaded with.
    """
    if length > context:
        advice = f", or load the model with context={max_context}" if max_context > context else ""
        raise ContextError(
            f"the prompt has {length:,} tokens and the model's context holds {context:,}; "
            f"shorten the prompt{advice}",
            num_tokens=length,
            context=context,
        )


class StopChecker:
    """Incremental detokenizer and stop conditions of one text."""

    __slots__ = ("_limits", "_pause_window", "_prompt_length", "text")

    def __init__(self, limits: Limits, prompt_length: int, text: TextStream | None = None) -> None:
        self._limits, self._prompt_length = limits, prompt_length
        self.text = TextStream(limits.stop) if text is None else text
        self._pause_window = b""  # the last bytes, in which a pause string may have started

    def copy(self) -> StopChecker:
        other = StopChecker(self._limits, self._prompt_length, self.text.copy())
        other._pause_window = self._pause_window
        return other

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self.text.matched_stop

    def push(
        self, token: int, piece: bytes, length: int, must_end: bool = False
    ) -> tuple[str, str | None]:
        """Take the next token; return the text that can be shown now, and the finish reason if any.

        Args:
            token: The token's id. An end token itself is never shown.
            piece: The token's bytes.
            length: Tokens of prompt and text, this one included.
            must_end: A grammar allows nothing more.
        """
        limits = self._limits
        if token in limits.end_ids:
            return self.text.push(b""), "stop"
        text = self.text.push(piece)
        if self.text.matched_stop is not None or must_end:
            return text, "stop"
        if length - self._prompt_length >= limits.max_tokens:
            return text, "length"
        if length >= limits.context and limits.endless is None:
            return text, "context"
        if limits.pauses and self._pauses(piece):
            return text, "pause"
        return text, None

    def _pauses(self, piece: bytes) -> bool:
        """Return whether this piece completes a pause string. Leading spaces do not count."""
        pauses = [pause.encode() for pause in self._limits.pauses]
        recent = self._pause_window + piece
        if not self._pause_window:
            recent = recent.lstrip()
        is_complete = any(pause in recent for pause in pauses)
        # The longest pause string bounds how far back a match can start.
        self._pause_window = recent[-max(map(len, pauses)) :]
        return is_complete

    def finish(self) -> str:
        """Return the text that was held back as a possible start of a stop string."""
        return self.text.finish()
