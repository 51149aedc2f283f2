"""OpenAI's vocabularies (tiktoken): ranks of byte strings, a split pattern, a few control tokens.

A rank file has one line per token: its bytes in base64, a space, its rank. The rank is the id, and
the merge whose result has the lowest rank comes first.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers import models

from unspool.errors import ModelFileError, SettingsError
from unspool.text.tokenizer import pieces
from unspool.text.tokenizer.pretokenizers import CL100K, GPT2, O200K, byte_level_splits
from unspool.text.tokenizer.vocabulary import SplittingEncoder, Vocabulary, end_ids, merges_by_rank

_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"


@dataclass(frozen=True)
class _Encoding:
    file: str  # name of the rank file, without extension
    pattern: str
    control: dict[str, int]


_END = "<|endoftext|>"
_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_O200K = {_END: 199999, "<|endofprompt|>": 200018}
_HARMONY = {
    "<|startoftext|>": 199998, _END: 199999, "<|return|>": 200002, "<|constrain|>": 200003,
    "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008,
    "<|call|>": 200012, "<|endofprompt|>": 200018,
}  # fmt: skip
_HARMONY |= {f"<|reserved_{n}|>": n for n in range(200000, 201088) if n not in _HARMONY.values()}

_ENCODINGS = {
    "gpt2": _Encoding("r50k_base", GPT2, {_END: 50256}),
    "r50k_base": _Encoding("r50k_base", GPT2, {_END: 50256}),
    "cl100k_base": _Encoding(
        "cl100k_base",
        CL100K,
        {_END: 100257, "<|endofprompt|>": 100276}
        | {text: 100258 + n for n, text in enumerate(_FIM)},
    ),
    "o200k_base": _Encoding("o200k_base", O200K, _O200K),
    "o200k_harmony": _Encoding("o200k_base", O200K, _HARMONY),
}


def read_tiktoken_vocabulary(name_or_path: str | Path, kind: str | None = None) -> Vocabulary:
    """Read the vocabulary of a named encoding or of a rank file."""
    path = Path(name_or_path)
    if path.suffix == ".tiktoken" or path.exists():
        encoding = _encoding(kind if kind is not None else path.stem, of_file=path)
    else:
        encoding = _encoding(kind if kind is not None else str(name_or_path))
        path = _cached_file(encoding.file)
    return _vocabulary(_read_ranks(path), encoding)


def _encoding(name: str, of_file: Path | None = None) -> _Encoding:
    for full_name in (name, f"{name}_base"):
        if full_name in _ENCODINGS:
            return _ENCODINGS[full_name]
    names = ", ".join(_ENCODINGS)
    if of_file is not None:
        raise SettingsError(
            f"the encoding of {of_file} is not clear from its name; give kind, one of {names}"
        )
    raise SettingsError(f"unknown encoding {name!r}; choose from {names}")


def _cached_file(file: str) -> Path:
    """Return the rank file in tiktoken's cache (named by the hash of its URL), or by its name."""
    url = _URL.format(file)
    folder = os.environ.get("TIKTOKEN_CACHE_DIR")
    if folder:
        for name in (hashlib.sha1(url.encode()).hexdigest(), f"{file}.tiktoken"):
            if (Path(folder) / name).is_file():
                return Path(folder) / name
        if file == "r50k_base" and (Path(folder) / "gpt2.tiktoken").is_file():
            return Path(folder) / "gpt2.tiktoken"
    raise ModelFileError(
        f"the ranks of {file} are not cached; download {url} and give the file's path, or put it "
        "into the folder named by TIKTOKEN_CACHE_DIR"
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ModelFileError(f"cannot read the rank file {path}: {error.strerror}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ModelFileError(
                f"line {number} of {path} is not a token in base64 and a rank; "
                "the file is damaged or not a rank file"
            ) from None
    if len(set(ranks.values())) != len(ranks) or any(bytes([n]) not in ranks for n in range(256)):
        raise ModelFileError(f"{path} lacks tokens or has a rank twice; download it again")
    return ranks


def _vocabulary(ranks: dict[bytes, int], encoding: _Encoding) -> Vocabulary:
    if min(ranks.values()) < 0 or max(ranks.values()) > 10_000_000:
        raise ModelFileError("the ranks are not token ids; the rank file is damaged")
    control = encoding.control
    clash = set(control.values()) & set(ranks.values())
    if clash:
        raise ModelFileError(
            f"the rank file uses the id {min(clash)} of a control token for another token; "
            "it belongs to a different encoding"
        )
    vocab = {pieces.byte_level_piece(data): rank for data, rank in ranks.items()}
    best_first = sorted(vocab, key=vocab.__getitem__)
    library = Library(models.BPE(vocab, merges_by_rank(best_first, vocab), ignore_merges=True))
    library.pre_tokenizer = byte_level_splits([encoding.pattern])
    by_id = {rank: piece for piece, rank in vocab.items()}
    by_id |= {n: text for text, n in control.items()}
    ids = vocab | control
    ends = end_ids(control, control.values())
    return Vocabulary(
        kind="byte-level BPE",
        size=max(by_id) + 1,
        encoder=SplittingEncoder(lambda: library, {}, control),
        piece=by_id.get,
        id_of=ids.get,
        piece_bytes=pieces.byte_level_bytes,
        text_piece=pieces.byte_level_text_piece,
        plain_text_ids=frozenset(control.values()),
        split_token_ids=frozenset(control.values()),
        control=control,
        end_ids=frozenset(ends),
        eos_id=control[_END],
        bos_id=None,
    )
