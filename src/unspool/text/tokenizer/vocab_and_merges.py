"""Build the library's tokenizer from vocab.json and merges.txt, the predecessors of tokenizer.json.

Some checkpoints (Dream, SDAR) have only these. The pre-tokenizer is in neither file; it follows
from the class that tokenizer_config.json names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers

from unspool.errors import ModelFileError
from unspool.text.tokenizer.pretokenizers import GPT2, QWEN2, byte_level_splits

_PATTERNS = {"Qwen2Tokenizer": QWEN2, "DreamTokenizer": QWEN2, "GPT2Tokenizer": GPT2}
FILES = ("vocab.json", "merges.txt")


def has_vocab_and_merges(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def read_vocab_and_merges(folder: Path) -> Library:
    """Read the tokenizer of a folder, without its added tokens."""
    class_name = str(_json(folder / "tokenizer_config.json").get("tokenizer_class"))
    pattern = _PATTERNS.get(class_name.removesuffix("Fast"))
    if pattern is None:
        supported = ", ".join(_PATTERNS)
        raise ModelFileError(
            f"{folder} has no tokenizer.json, and the class {class_name} is not supported without "
            f"one; supported: {supported}"
        )
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    pairs = [(left_piece, right_piece) for left_piece, _, right_piece in merges]
    try:
        library = Library(models.BPE(_json(folder / "vocab.json"), pairs))
    except Exception as error:  # the library raises bare exceptions
        reason = " ".join(str(error).split())[:200]
        raise ModelFileError(
            f"{folder}: vocab.json and merges.txt cannot be used: {reason}"
        ) from None
    if pattern is QWEN2:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = byte_level_splits([pattern])
    library.decoder = decoders.ByteLevel()
    return library


def _json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{file} cannot be read: {error}") from None
    return content
