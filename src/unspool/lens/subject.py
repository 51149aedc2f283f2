"""Who is looked at: what the lenses need of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from unspool.engine.generation import Generation, Source
from unspool.errors import SettingsError

if TYPE_CHECKING:
    from unspool.backends.base import Loaded
    from unspool.engine.engine import Engine
    from unspool.engine.tree import Branch
    from unspool.engine.write import Writers
    from unspool.model.config import ModelConfig
    from unspool.sampling import GrammarVocabulary
    from unspool.text.tokenizer.tokenizer import Tokenizer

Text = str | Sequence[int] | Generation
"""A text, its token ids, or a generation: prompt and new tokens together."""


class Subject(Source, Protocol):
    """A `LanguageModel`, as far as looking at it needs."""

    @property
    def model(self) -> Loaded: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def grammar_vocabulary(self) -> GrammarVocabulary: ...

    @property
    def path(self) -> Path | None: ...

    @property
    def context(self) -> int: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def writers(self) -> Writers: ...

    def opened(self, tokens: Sequence[int]) -> AbstractContextManager[Branch]:
        """A branch with these tokens, released again afterwards."""

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids, checked: not empty, in the vocabulary, within the context."""

    def readable(self, token: int) -> str:
        """A token as text, for people."""


def tokens_of(lm: Subject, text: Text) -> list[int]:
    if isinstance(text, Generation):
        return lm.prompt_ids([*text.prompt, *text.tokens])
    return lm.prompt_ids(text)


def checked_token(lm: Subject, token: int) -> int:
    """The token, if the vocabulary has it."""
    size = lm.config.vocab_size
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
        raise SettingsError(f"token {token!r} is not in the vocabulary, which ends at {size - 1}")
    return token
