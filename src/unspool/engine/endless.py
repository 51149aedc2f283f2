"""Context truncation: texts that grow longer than the model's context (the option `endless`).

A model reads at most `context` tokens. A text that may outgrow it keeps its first tokens visible
(the task, and the attention sinks that models need: Xiao et al. 2023, StreamingLLM) and drops the
oldest of the others, half of the free context at a time. The remaining tokens are read again as a
text without a gap.

Reading them again makes the result exact: keys and values computed while the dropped tokens were
visible still depend on them, and no rotation to other positions changes that. As half of the
context is free after each truncation, every written token is read about once more, which costs far
less than writing it.

The number of dropped tokens follows from the length alone. So a text that is rewound, resumed or
replayed sees the same tokens at the same position, and the same seed writes the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.errors import SettingsError

SINKS = 4  # first tokens that attract the attention nothing else needs (attention sinks)


def num_truncated(length: int, context: int, num_kept: int) -> int:
    """Return how many tokens after the first `num_kept` are dropped from a text of `length`."""
    if length <= context:
        return 0
    block = max(1, (context - num_kept) // 2)
    return -(-(length - context) // block) * block


def visible_tokens(tokens: Sequence[int], context: int, num_kept: int) -> list[int]:
    """Return the tokens that the model sees when it writes the next one."""
    first_recent = num_kept + num_truncated(len(tokens), context, num_kept)
    return [*tokens[:num_kept], *tokens[first_recent:]]


def truncation_note(length: int, context: int, num_kept: int) -> str:
    """Describe which tokens the model saw at the end of a text of `length` tokens."""
    num_dropped = num_truncated(length, context, num_kept)
    return (
        f"the text outgrew the context of {context:,} tokens: at its end the model saw the first "
        f"{num_kept:,} and the last {length - num_kept - num_dropped:,} tokens, and none of the "
        f"{num_dropped:,} between"
    )


def parse_endless(value: Any, prompt_length: int, context: int) -> int | None:
    """Return how many first tokens stay visible; None if the text ends with the context."""
    if value is None or value is False:
        return None
    if value is True:  # a short prompt is the task: it stays
        return prompt_length if prompt_length <= context // 4 else min(SINKS, context // 2)
    if not isinstance(value, int) or value < 1:
        raise SettingsError(
            f"endless must be True, or the number of first tokens to keep visible, got {value!r}"
        )
    if value > context // 2:
        raise SettingsError(
            f"endless keeps {value:,} tokens visible, more than half of the context of "
            f"{context:,}; keep fewer"
        )
    return value
