"""Texts and tokens as arguments of the lenses."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.engine.generation import Generation
from unspool.errors import SettingsError
from unspool.session import Session

TextLike = str | Sequence[int] | Generation
"""A text, its token ids, or a generation (prompt and new tokens)."""


def to_token_ids(lm: Session, text: TextLike) -> list[int]:
    if isinstance(text, Generation):
        return lm.prompt_ids([*text.prompt, *text.tokens])
    return lm.prompt_ids(text)


def adapter_name(text: TextLike) -> str | None:
    """Adapter of a generation."""
    return text.request.adapter if isinstance(text, Generation) else None


def resolve_token(lm: Session, token: int | str) -> int:
    """Token id from an id, or from text that is exactly one token."""
    if isinstance(token, str):
        return lm.single_token(token)
    size = lm.config.vocab_size
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
        raise SettingsError(f"token {token!r} is not in the vocabulary (0 to {size - 1})")
    return token
