"""OpenAI's vocabularies, to be compared with the model's own; where their rank files are here."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, get_args

from unspool.errors import UnspoolError
from unspool.text.tokenizer.tokenizer import Tokenizer

VocabularyName = Literal["gpt2", "cl100k", "o200k"]
NAMES: tuple[VocabularyName, ...] = get_args(VocabularyName)


@lru_cache(maxsize=len(NAMES))
def opened(name: VocabularyName) -> Tokenizer:
    """One of them; takes about a second the first time."""
    return Tokenizer.from_tiktoken(name)


def available(name: VocabularyName) -> dict[str, Any]:
    """Whether it is here, and if not, what to do about it."""
    try:
        return {"name": name, "available": True, "size": len(opened(name))}
    except UnspoolError as error:
        return {"name": name, "available": False, "why": str(error)}
