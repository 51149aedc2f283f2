"""Builds the library's tokenizer from the two files that came before tokenizer.json: vocab.json has
the pieces and merges.txt their merges. Some checkpoints (Dream, SDAR) still have only those.

How text is cut into words is in neither of them: the class that tokenizer_config.json names tells.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from unspool.errors import ModelFileError
from unspool.text.tokenizer.pretokenizers import GPT2, QWEN2

_CUTS = {"Qwen2Tokenizer": QWEN2, "DreamTokenizer": QWEN2, "GPT2Tokenizer": GPT2}
FILES = ("vocab.json", "merges.txt")


def has_vocab_and_merges(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def read_vocab_and_merges(folder: Path) -> Library:
    """The tokenizer of a folder; what is added to its vocabulary is named by the files beside."""
    named = str(_json(folder / "tokenizer_config.json").get("tokenizer_class"))
    cut = _CUTS.get(named.removesuffix("Fast"))
    if cut is None:
        known = ", ".join(_CUTS)
        raise ModelFileError(
            f"{folder}: has no tokenizer.json, and how a {named} cuts text is not known; without "
            f"one these can be read: {known}"
        )
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in merges]
    try:
        library = Library(models.BPE(_json(folder / "vocab.json"), pairs))
    except Exception as error:  # the library raises bare exceptions
        reason = " ".join(str(error).split())[:200]
        raise ModelFileError(
            f"{folder}: vocab.json and merges.txt cannot be used: {reason}"
        ) from None
    if cut is QWEN2:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    return library


def _json(file: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{file} cannot be read: {error}") from None
    return read
