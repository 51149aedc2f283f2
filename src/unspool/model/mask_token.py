"""Settings of diffusion checkpoints that config.json lacks: the mask token, which the tokenizer's
files name, and the block size, which only the folder's name shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unspool.errors import ModelFileError
from unspool.model.config_hf import read_json

# Spellings to try if no file names the mask token, as in the oldest BERTs.
_COMMON_MASKS = ("[MASK]", "<mask>", "<|mask|>", "|<MASK>|", "<|mdm_mask|>")
_BD3LM_BLOCK = 32  # tokens of a block in dllm's bd3lm models


def add_block_from_name(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add the block size of dllm's block-diffusion models, which can be told from its other models
    only by `bd3lm` in the path."""
    lacks_block = str(raw.get("model_type")).startswith("a2d-") and raw.get("block_size") is None
    if lacks_block and "bd3lm" in str(folder.resolve()):
        return {**raw, "block_size": _BD3LM_BLOCK}
    return raw


def has_mask_setting(raw: Mapping[str, Any]) -> bool:
    """Whether config.json has the mask token."""
    return raw.get("mask_token_id") is not None or "unspool" in raw


def find_mask_id(folder: Path) -> int | None:
    """The id of the mask token in a folder's vocabulary; None: it has none."""
    try:
        ids, name = _numbers(folder), _named(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFileError(f"{folder}: invalid tokenizer files ({error!r})") from None
    return next((ids[token] for token in ([name] if name else _COMMON_MASKS) if token in ids), None)


def _named(folder: Path) -> str | None:
    """The text of the mask token, if a file names it."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(folder, file).get("mask_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and text:
            return text
    return None


def _numbers(folder: Path) -> dict[str, int]:
    """All tokens that the files list, with their ids."""
    vocabulary = _read(folder, "tokenizer.json")
    vocab = (vocabulary.get("model") or {}).get("vocab") or _read(folder, "vocab.json")
    ids: dict[str, int] = dict(vocab) if isinstance(vocab, Mapping) else {}
    ids |= {token["content"]: int(token["id"]) for token in vocabulary.get("added_tokens") or []}
    added_tokens = _read(folder, "tokenizer_config.json").get("added_tokens_decoder") or {}
    return ids | {token["content"]: int(token_id) for token_id, token in added_tokens.items()}


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}
