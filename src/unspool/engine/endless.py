"""Texts longer than the context: what of them is in view.

A model reads at most `context` tokens. A text that may grow beyond that keeps its first tokens in
view (the task, and the attention sinks without which models lose their footing: Xiao et al. 2023)
and forgets the oldest of the others, half of them at a time. What is left moves up and is read
again, as if it were a text of its own: the model sees first tokens and last tokens side by side,
with nothing to tell it that something stood between.

Reading again makes it exact. Keys and values that were computed with the forgotten tokens in view
still know of them, and turned to other positions they are what no run of the model would give; read
again, they are those of a fresh run. As half of the room is free after each jump, every written
token is read about once more, which costs far less than writing it.

How much is forgotten follows from the length alone. So a text that is rewound, gone on with or
replayed has the same view at the same place, and the same seed writes the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.errors import SettingsError

SINKS = 4  # first tokens that hold the attention that nothing else wants


def forgotten(length: int, context: int, kept: int) -> int:
    """How many tokens behind the first `kept` are out of view in a text of so many tokens."""
    if length <= context:
        return 0
    jump = max(1, (context - kept) // 2)
    return -(-(length - context) // jump) * jump


def in_view(tokens: Sequence[int], context: int, kept: int) -> list[int]:
    """Those tokens of a text that the model sees when it writes the next one."""
    first_seen = kept + forgotten(len(tokens), context, kept)
    return [*tokens[:kept], *tokens[first_seen:]]


def told(length: int, context: int, kept: int) -> str:
    """What the model no longer saw at the end of a text, for people."""
    gone = forgotten(length, context, kept)
    return (
        f"the text outgrew the context of {context:,} tokens: at its end the model saw the first "
        f"{kept:,} and the last {length - kept - gone:,} tokens, and none of the {gone:,} between"
    )


def kept_tokens(asked: Any, prompt_length: int, context: int) -> int | None:
    """How many first tokens stay in view, from what a caller gave as `endless`: None if the text
    ends with the context."""
    if asked is None or asked is False:
        return None
    if asked is True:  # a short prompt is the task: it stays
        return prompt_length if prompt_length <= context // 4 else min(SINKS, context // 2)
    if not isinstance(asked, int) or asked < 1:
        raise SettingsError(
            f"endless is {asked!r}; it may be True, or how many of the first tokens stay in view"
        )
    if asked > context // 2:
        raise SettingsError(
            f"endless keeps {asked:,} tokens in view, more than half of the context of "
            f"{context:,}; keep fewer"
        )
    return asked
