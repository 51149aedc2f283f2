"""Unspool: an LLM inference engine in which every step of generation is visible.

    import unspool
    lm = unspool.load()
    print(lm.generate("Once upon a time"))

Importing this package is fast: heavy modules are imported when a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unspool.errors import BatchError, ContextError, ModelFileError, SettingsError, UnspoolError

if TYPE_CHECKING:
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

_MODULES = {  # of names that are imported when they are first used
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
    if name not in _MODULES:
        raise AttributeError(f"module 'unspool' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
