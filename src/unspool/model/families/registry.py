"""All model families, and how a file's model type is resolved to one.

A family is a table: its `model_type`, the settings that are fixed for it, and where its config.json
and its tensor names differ from Llama's. GGUF files use one set of tensor names for all families
(`gguf_rules` in `family.py`).
"""

from __future__ import annotations

from dataclasses import replace

from unspool.errors import ModelFileError
from unspool.model.families.causal import ALIASES, CAUSAL, GGUF_ALIASES, GPT_OSS
from unspool.model.families.family import Family
from unspool.model.families.masked import MASKED
from unspool.model.families.recurrent import MAMBA, RECURRENT

_ALL = (*CAUSAL, GPT_OSS, *RECURRENT, *MAMBA, *MASKED)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def family_of_model_type(model_type: object) -> Family:
    """The family of a model_type of config.json; an error lists the supported ones."""
    if model_type in ALIASES:
        name, alias_defaults, changes = ALIASES[str(model_type)]
        defaults = {**FAMILIES[name].defaults, **alias_defaults}
        return replace(FAMILIES[name], defaults=defaults, **changes)
    for family in _ALL:
        if family.model_type == model_type:
            return family
    supported = ", ".join(sorted({family.model_type for family in _ALL} | ALIASES.keys()))
    raise ModelFileError(f"models of type {model_type!r} are not supported; these are: {supported}")


def family_of_gguf(architecture: object, experts: int) -> Family:
    """The family of a general.architecture; 'llama' with experts is Mixtral."""
    if architecture in GGUF_ALIASES:
        return FAMILIES[GGUF_ALIASES[str(architecture)]]
    candidates = [family for family in _ALL if family.gguf == architecture]
    matching = [family for family in candidates if ("experts" in family.keys) == (experts > 0)]
    if matching or len(candidates) == 1:  # Gemma 4 has experts or not
        return (matching or candidates)[0]
    supported = ", ".join(sorted({f.gguf for f in _ALL if f.gguf} | GGUF_ALIASES.keys()))
    raise ModelFileError(
        f"GGUF files of architecture {architecture!r} are not supported; these are: {supported}"
    )
