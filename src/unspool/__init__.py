"""Unspool: text unspools from a language model one token at a time, every step visible.

    import unspool
    lm = unspool.load()
    print(lm.generate("Once upon a time"))

Importing this package is quick: nothing heavy is loaded before a model is.
"""

from __future__ import annotations

from unspool.errors import BatchError, ContextError, ModelFileError, SettingsError, UnspoolError

TYPE_CHECKING = False  # as type checkers know it; importing `typing` takes longer than all the rest
if TYPE_CHECKING:
    from typing import Any

    from unspool.costing.measuring import costs
    from unspool.decoding.fill.gaps import gap
    from unspool.engine.generation import Generation, Generations
    from unspool.engine.options import Options
    from unspool.engine.steps import Score, Step
    from unspool.language_model import LanguageModel
    from unspool.loading import load
    from unspool.text.tokenizer.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "ContextError",
    "Generation",
    "Generations",
    "LanguageModel",
    "ModelFileError",
    "Options",
    "Score",
    "SettingsError",
    "Step",
    "Tokenizer",
    "UnspoolError",
    "__version__",
    "costs",
    "gap",
    "load",
]

_HOME_OF = {
    "costs": "unspool.costing.measuring",
    "gap": "unspool.decoding.fill.gaps",
    "load": "unspool.loading",
    "LanguageModel": "unspool.language_model",
    "Generation": "unspool.engine.generation",
    "Generations": "unspool.engine.generation",
    "Options": "unspool.engine.options",
    "Score": "unspool.engine.steps",
    "Step": "unspool.engine.steps",
    "Tokenizer": "unspool.text.tokenizer.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'unspool' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
