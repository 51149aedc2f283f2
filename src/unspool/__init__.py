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
    from unspool.backends.interventions import (
        Add,
        ClampFeature,
        Function,
        Intervention,
        MeanAblate,
        ProjectOut,
        Replace,
        Scale,
    )
    from unspool.costs.measuring import measure_costs
    from unspool.decoding.infill.result import gap
    from unspool.engine.generation import Generation, Generations
    from unspool.engine.request import Options
    from unspool.engine.results import Score, Step
    from unspool.lm import LanguageModel
    from unspool.loading import load
    from unspool.text.tokenizer.tokenizer import Tokenizer

__version__ = "1.0.0"

__all__ = [
    "Add",
    "BatchError",
    "ClampFeature",
    "ContextError",
    "Function",
    "Generation",
    "Generations",
    "Intervention",
    "LanguageModel",
    "MeanAblate",
    "ModelFileError",
    "Options",
    "ProjectOut",
    "Replace",
    "Scale",
    "Score",
    "SettingsError",
    "Step",
    "Tokenizer",
    "UnspoolError",
    "__version__",
    "gap",
    "load",
    "measure_costs",
]

_INTERVENTIONS = (
    "Add", "ClampFeature", "Function", "Intervention", "MeanAblate", "ProjectOut", "Replace",
    "Scale",
)  # fmt: skip
_MODULES = {  # of names that are imported when they are first used
    **dict.fromkeys(_INTERVENTIONS, "unspool.backends.interventions"),
    "gap": "unspool.decoding.infill.result",
    "load": "unspool.loading",
    "measure_costs": "unspool.costs.measuring",
    "LanguageModel": "unspool.lm",
    "Generation": "unspool.engine.generation",
    "Generations": "unspool.engine.generation",
    "Options": "unspool.engine.request",
    "Score": "unspool.engine.results",
    "Step": "unspool.engine.results",
    "Tokenizer": "unspool.text.tokenizer.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'unspool' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
