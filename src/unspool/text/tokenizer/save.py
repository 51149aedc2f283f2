"""Write a vocabulary as tokenizer.json and tokenizer_config.json, for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unspool.text.tokenizer.encoders import AddedTokenEncoder, SplittingEncoder
from unspool.text.tokenizer.vocabulary import Vocabulary

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}


def save_vocabulary(vocabulary: Vocabulary, folder: str | Path) -> None:
    """Write the two files into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_json = _tokenizer_json_of(vocabulary)
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer_json, ensure_ascii=False), encoding="utf-8"
    )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    for name in ("bos", "eos", "unk", "pad"):
        token = getattr(vocabulary, f"{name}_id")
        if token is not None:
            settings[f"{name}_token"] = vocabulary.piece(token)
    if vocabulary.chat_template is not None:
        settings["chat_template"] = vocabulary.chat_template
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, ensure_ascii=False, indent=2), encoding="utf-8"
    )


def _tokenizer_json_of(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the library's JSON, with the tokens of a `SplittingEncoder` as added tokens."""
    encoder = vocabulary.encoder
    if isinstance(encoder, AddedTokenEncoder):
        tokenizer_json: dict[str, Any] = json.loads(encoder.library.to_str())
        return tokenizer_json
    assert isinstance(encoder, SplittingEncoder)
    described: dict[str, Any] = json.loads(encoder.plain.to_str())
    controls = set(vocabulary.control.values())
    for text, token in sorted(encoder.split_tokens.items(), key=lambda item: item[1]):
        if isinstance(described["model"]["vocab"], dict):
            described["model"]["vocab"].setdefault(text, token)
        described["added_tokens"].append(
            {
                "id": token,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in controls,
            }
        )
    if described.get("decoder") is None:
        described["decoder"] = _decoder(vocabulary)
    if vocabulary.add_bos and described.get("post_processor") is None:
        described["post_processor"] = _start_token(vocabulary)
    return described


def _decoder(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Return the decoder with which transformers turns pieces into text."""
    if vocabulary.kind == "byte-level BPE":
        return _BYTE_LEVEL
    if "SentencePiece" not in vocabulary.kind:
        return None
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.leading_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _start_token(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the post-processor with which transformers adds the start token."""
    assert vocabulary.bos_id is not None
    text = vocabulary.piece(vocabulary.bos_id)
    start = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, second],
        "special_tokens": {text: {"id": text, "ids": [vocabulary.bos_id], "tokens": [text]}},
    }
