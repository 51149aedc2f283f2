"""Vocabularies in Hugging Face folders: tokenizer.json, vocab.json with merges.txt, and saving."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Library

from unspool.errors import ModelFileError
from unspool.text.tokenizer import pieces
from unspool.text.tokenizer.pretokenizers import GPT2, QWEN2, byte_level_splits
from unspool.text.tokenizer.vocabulary import (
    UNAMBIGUOUS_END_TEXTS,
    AddedTokenEncoder,
    SplittingEncoder,
    Vocabulary,
    end_ids,
)

# -- Build the library's tokenizer from vocab.json and merges.txt, the predecessors of
# tokenizer.json
#
# Some checkpoints (Dream, SDAR) have only these. The pre-tokenizer is in neither file; it follows
# from the class that tokenizer_config.json names.

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


# -- Read a Hugging Face tokenizer.json and its companion files


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Read the vocabulary of a tokenizer.json, or of a folder with one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file() and has_vocab_and_merges(path):
        return _TokenizerFolder(path, read_vocab_and_merges(path)).vocabulary()
    if not file.is_file():
        raise ModelFileError(f"there is no {file}; give a tokenizer.json or a folder with one")
    try:
        library = Library.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        reason = " ".join(str(error).split())[:200]
        raise ModelFileError(f"{file} cannot be read as a tokenizer: {reason}") from None
    # Training settings in the file; a prompt is neither truncated nor padded.
    library.no_truncation()
    library.no_padding()
    return _TokenizerFolder(file.parent, library).vocabulary()


class _TokenizerFolder:
    """Builds a `Vocabulary` from a library tokenizer and its companion files."""

    def __init__(self, folder: Path, library: Library) -> None:
        self.folder = folder
        self.library = library
        self.config = self._json("tokenizer_config.json")
        self.named = self._json("special_tokens_map.json") | {
            key: value for key, value in self.config.items() if value is not None
        }
        self._add_missing_tokens()
        self._match_control_tokens_as_written()
        self.added: dict[int, Any] = library.get_added_tokens_decoder()

    def vocabulary(self) -> Vocabulary:
        library, added = self.library, self.added
        bos_id, eos_id = self._named("bos_token"), self._named("eos_token")
        unk_id, pad_id = self._named("unk_token"), self._named("pad_token")
        if unk_id is None and (unknown := getattr(library.model, "unk_token", None)):
            unk_id = library.token_to_id(unknown)
        before, after = self._template_ends()
        # BERT calls them CLS and SEP.
        bos_id = before[0] if bos_id is None and len(before) == 1 else bos_id
        eos_id = after[0] if eos_id is None and len(after) == 1 else eos_id
        texts = {token.content: n for n, token in added.items()}
        control = {token.content: n for n, token in added.items() if token.special}
        control |= {text: texts[text] for text in UNAMBIGUOUS_END_TEXTS if text in texts}
        for n in (bos_id, eos_id):
            if n is not None:
                control[self._piece(n) or ""] = n
        size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        ends = end_ids(texts, control.values()) | self._end_ids(size)
        if eos_id is None and after:
            ends.add(after[-1])
        elif eos_id is not None:
            ends.add(eos_id)
        kind, piece_bytes, text_piece = self._notation()
        marks_spaces = text_piece is pieces.space_marked_text_piece
        prefix = self._space_prefix()
        if kind == "byte-level BPE" and prefix != "always":
            prefix = "never"
        return Vocabulary(
            kind=kind,
            size=size,
            encoder=AddedTokenEncoder(library, control.values()),
            piece=self._piece,
            id_of=library.token_to_id,
            piece_bytes=piece_bytes,
            text_piece=text_piece,
            # If ▁ is a space, it is one in added tokens too: gemma's '▁▁' is two spaces.
            plain_text_ids=frozenset(control.values() if marks_spaces else added),
            split_token_ids=frozenset(added),
            control=control,
            end_ids=frozenset(ends),
            bos_id=bos_id,
            eos_id=eos_id,
            unk_id=unk_id,
            pad_id=pad_id,
            add_bos=self._flag("add_bos_token", bool(before)),
            add_eos=self._flag("add_eos_token", bool(after)),
            chat_template=self._chat_template(),
            leading_space=prefix != "never",
            space_after_added=prefix == "always",
        )

    def _json(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        if not file.is_file():
            return {}
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{file} cannot be read: {error}") from None
        if not isinstance(content, dict):
            raise ModelFileError(f"{file} must contain a JSON object")
        return content

    def _add_missing_tokens(self) -> None:
        """Add tokens that only tokenizer_config.json names."""
        listed = self.config.get("added_tokens_decoder")
        if not isinstance(listed, Mapping):
            return
        present = {token.content for token in self.library.get_added_tokens_decoder().values()}
        missing = [
            AddedToken(
                token["content"],
                **{
                    name: bool(token.get(name, False))
                    for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
                },
            )
            for _, token in sorted(listed.items(), key=lambda item: _number(item[0]))
            if isinstance(token, Mapping)
            and isinstance(token.get("content"), str)
            and token["content"] not in present
        ]
        if missing:
            self.library.add_tokens(missing)

    def _match_control_tokens_as_written(self) -> None:
        """Match control tokens in the text as written.

        Some files match them in the normalized text, which has a ▁ before them: then `a</s>` would
        not contain the token.
        """
        normalized = [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=True,
            )
            for token in self.library.get_added_tokens_decoder().values()
            if token.special and token.normalized
        ]
        if normalized:
            self.library.add_special_tokens(normalized)

    def _piece(self, token: int) -> str | None:
        added = self.added.get(token)
        piece: str | None = self.library.id_to_token(token) if added is None else added.content
        return piece

    def _named(self, name: str) -> int | None:
        value = self.named.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if not isinstance(value, str | None):
            raise self._wrong_type("tokenizer_config.json", name, "a string", value)
        return self.library.token_to_id(value) if isinstance(value, str) and value else None

    def _flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if not isinstance(value, bool | None):
            raise self._wrong_type("tokenizer_config.json", name, "true or false", value)
        return default if value is None else value

    def _wrong_type(self, file: str, key: str, type_: str, value: object) -> ModelFileError:
        return ModelFileError(f"{self.folder / file}: {key} must be {type_}, got {value!r:.60}")

    def _template_ends(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the file's post-processor puts before and after a text."""
        if self.library.post_processor is None:
            return [], []
        with_text = self.library.encode("a", add_special_tokens=True)
        text_positions = [n for n, mask in enumerate(with_text.special_tokens_mask) if not mask]
        if not text_positions:
            return [], []
        return with_text.ids[: text_positions[0]], with_text.ids[text_positions[-1] + 1 :]

    def _end_ids(self, size: int) -> set[int]:
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = self._json(name).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            if any(isinstance(n, bool) or not isinstance(n, int | None) for n in values):
                type_ = "an integer or a list of integers"
                raise self._wrong_type(name, "eos_token_id", type_, value)
            ids.update(n for n in values if n is not None and 0 <= n < size)
        return ids

    def _chat_template(self) -> str | None:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelFileError(f"{file} cannot be read: {error}") from None
        template = self.config.get("chat_template")
        if isinstance(template, list):
            by_name = {
                entry.get("name"): entry.get("template")
                for entry in template
                if isinstance(entry, Mapping)
            }
            template = by_name.get("default") or next(iter(by_name.values()), None)
        if not isinstance(template, str | None):
            raise self._wrong_type("tokenizer_config.json", "chat_template", "a string", template)
        return template

    def _notation(self) -> tuple[str, pieces.PieceToBytes, Any]:
        """Return the kind of vocabulary and the conversions of its pieces."""
        model = self.library.model
        parts = _parts(self.library.decoder) + _parts(self.library.pre_tokenizer)
        types = {part["type"] for part in parts}
        if isinstance(model, models.WordPiece):
            mark = model.continuing_subword_prefix
            return "WordPiece", pieces.word_piece_bytes(mark), str
        if isinstance(model, models.Unigram):
            # Only the decoder shows whether there is byte fallback.
            fallback = "ByteFallback" in types
            to_bytes = pieces.byte_fallback_bytes if fallback else pieces.space_marked_bytes
            return "Unigram", to_bytes, pieces.space_marked_text_piece
        if not isinstance(model, models.BPE):
            return type(model).__name__, pieces.word_piece_bytes(""), str
        if "ByteLevel" in types:
            return "byte-level BPE", pieces.byte_level_bytes, pieces.byte_level_text_piece
        marks = {part.get("content") for part in parts if part["type"] == "Replace"}
        if model.byte_fallback:
            return "SentencePiece BPE", pieces.byte_fallback_bytes, pieces.space_marked_text_piece
        if "Metaspace" in types or " " in marks:
            return "SentencePiece BPE", pieces.space_marked_bytes, pieces.space_marked_text_piece
        return "BPE", pieces.suffixed_bytes(model.end_of_word_suffix or ""), str

    def _space_prefix(self) -> str:
        """Return where encoding adds a space: "never", "first" (at the start) or "always" (also
        after each added token)."""
        if isinstance(self.library.model, models.WordPiece):
            return "always"
        if any(part["type"] == "Prepend" for part in _parts(self.library.normalizer)):
            return "always"
        for part in _parts(self.library.pre_tokenizer):
            if part["type"] == "Metaspace":
                scheme = part.get("prepend_scheme")
                return str(scheme if scheme else "always")
            if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
                return "always"
        return "never"


def _number(text: Any) -> int:
    return int(text) if str(text).isdigit() else 0


def _parts(component: Any) -> list[dict[str, Any]]:
    """Return the settings of a normalizer, pre-tokenizer or decoder, as a list of its parts."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in settings:
            return list(settings[key])
    return [settings]


# -- Write a vocabulary as tokenizer.json and tokenizer_config.json, for transformers

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
