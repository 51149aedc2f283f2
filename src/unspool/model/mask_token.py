"""What some checkpoints that look ahead do not say in their config.json: the mask token, which the
files of the vocabulary name, and the blocks, of which only the folder's name tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unspool.errors import ModelFileError
from unspool.model.config_hf import read_json

# How it is written where no file says which it is: the oldest BERTs' files do not.
_USUAL = ("[MASK]", "<mask>", "<|mask|>", "|<MASK>|", "<|mdm_mask|>")
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
    """The number of the mask token of the vocabulary in a folder; None if it has none."""
    try:
        numbers, named = _numbers(folder), _named(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFileError(
            f"{folder}: the files of its vocabulary cannot be understood ({error!r})"
        ) from None
    return next((numbers[text] for text in ([named] if named else _USUAL) if text in numbers), None)


def _named(folder: Path) -> str | None:
    """How the mask token is written, if the files say it."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(folder, file).get("mask_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and text:
            return text
    return None


def _numbers(folder: Path) -> dict[str, int]:
    """The tokens that may be meant, as far as the files list them."""
    vocabulary = _read(folder, "tokenizer.json")
    pieces = (vocabulary.get("model") or {}).get("vocab") or _read(folder, "vocab.json")
    found: dict[str, int] = dict(pieces) if isinstance(pieces, Mapping) else {}
    found |= {token["content"]: int(token["id"]) for token in vocabulary.get("added_tokens") or []}
    listed = _read(folder, "tokenizer_config.json").get("added_tokens_decoder") or {}
    return found | {token["content"]: int(number) for number, token in listed.items()}


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}
