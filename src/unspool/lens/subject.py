"""What is looked at: texts and tokens, checked."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.engine.generation import Generation
from unspool.errors import SettingsError
from unspool.session import Session

Text = str | Sequence[int] | Generation
"""A text, its token ids, or a generation: prompt and new tokens together."""


def tokens_of(lm: Session, text: Text) -> list[int]:
    if isinstance(text, Generation):
        return lm.prompt_ids([*text.prompt, *text.tokens])
    return lm.prompt_ids(text)


def adapter_of(text: Text) -> str | None:
    """What a generation was written with."""
    return text.request.adapter if isinstance(text, Generation) else None


def checked_token(lm: Session, token: int | str) -> int:
    """The id of a token given by its id, or by text that is exactly one token."""
    if isinstance(token, str):
        return lm.single_token(token)
    size = lm.config.vocab_size
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
        raise SettingsError(f"token {token!r} is not in the vocabulary, which ends at {size - 1}")
    return token
