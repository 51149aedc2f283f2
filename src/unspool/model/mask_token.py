"""What some checkpoints that look ahead do not say in their config.json: the mask token, which the
files of the vocabulary name, and the blocks, of which only the folder's name tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unspool.model.config_hf import read_json

_TOLD_BY_NAME = 32  # tokens: the blocks of dllm's models that are called bd3lm


def named_block(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """dllm's two kinds of models have the same files: those that work block by block have `bd3lm`
    in their name, which is a folder's on the way to the file."""
    told = str(raw.get("model_type")).startswith("a2d-") and raw.get("block_size") is None
    if told and "bd3lm" in str(folder.resolve()):
        return {**raw, "block_size": _TOLD_BY_NAME}
    return raw


def says_mask(raw: Mapping[str, Any]) -> bool:
    """Whether config.json names the mask token itself."""
    return raw.get("mask_token_id") is not None or "unspool" in raw


def mask_id_in(folder: Path) -> int | None:
    """The number of the mask token of the vocabulary in a folder; None if it names none."""
    named = _named(folder)
    if named is None:
        return None
    listed = _read(folder, "tokenizer_config.json").get("added_tokens_decoder") or {}
    for number, token in listed.items():
        if isinstance(token, Mapping) and token.get("content") == named and number.isdigit():
            return int(number)
    vocabulary = _read(folder, "tokenizer.json")
    for token in vocabulary.get("added_tokens") or []:
        if token.get("content") == named:
            return int(token["id"])
    pieces = (vocabulary.get("model") or {}).get("vocab") or _read(folder, "vocab.json")
    found = pieces.get(named) if isinstance(pieces, Mapping) else None
    return found if isinstance(found, int) else None


def _named(folder: Path) -> str | None:
    """How the mask token is written."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(folder, file).get("mask_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and text:
            return text
    return None


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}
