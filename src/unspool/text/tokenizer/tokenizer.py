"""Text to token ids and back: one `Tokenizer` for every kind of vocabulary.

    tokenizer = Tokenizer.from_file("folder/with/tokenizer.json")
    tokenizer = Tokenizer.from_gguf(metadata)
    tokenizer = Tokenizer.from_tiktoken("cl100k")
    ids = tokenizer.encode("Why do leaves change color in fall?")
    tokenizer.decode(ids)

Every token has exact bytes, and a text is those bytes joined. Control tokens written in a text
(`<|im_end|>`) are text unless `specials=True` asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unspool.errors import UnspoolError
from unspool.text.tokenizer.characters import readable
from unspool.text.tokenizer.encoders import Encoder, drops_characters, has_character
from unspool.text.tokenizer.gguf_save import gguf_vocabulary
from unspool.text.tokenizer.gguf_vocab import read_gguf_vocabulary
from unspool.text.tokenizer.pieces import text_bytes
from unspool.text.tokenizer.save import save_vocabulary
from unspool.text.tokenizer.tiktoken_ranks import read_tiktoken_vocabulary
from unspool.text.tokenizer.tokenizer_json import read_tokenizer_json
from unspool.text.tokenizer.vocabulary import Vocabulary

_MOST_LISTED = 100  # characters that a message names


class Tokenizer:
    """Turns text into token ids and ids into exact bytes. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self._known_characters: dict[str, bool] = {}
        self.kind: str = vocabulary.kind
        self.vocab_size: int = vocabulary.size
        self.bos_id: int | None = vocabulary.bos_id
        self.eos_id: int | None = vocabulary.eos_id
        self.unk_id: int | None = vocabulary.unk_id
        self.pad_id: int | None = vocabulary.pad_id
        self.add_bos: bool = vocabulary.add_bos and vocabulary.bos_id is not None
        self.add_eos: bool = vocabulary.add_eos and vocabulary.eos_id is not None
        self.end_ids: frozenset[int] = vocabulary.end_ids
        self.special_tokens: Mapping[str, int] = MappingProxyType(dict(vocabulary.control))
        self.special_ids: frozenset[int] = frozenset(vocabulary.control.values())
        self.chat_template: str | None = vocabulary.chat_template

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """From a tokenizer.json, or a folder that holds one, with the files beside it."""
        return cls(read_tokenizer_json(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file."""
        return cls(read_gguf_vocabulary(metadata))

    @classmethod
    def from_tiktoken(cls, name_or_path: str | Path, *, kind: str | None = None) -> Tokenizer:
        """From OpenAI's ranks: 'cl100k', 'o200k', 'gpt2', or the path of a .tiktoken file.

        `kind` names the encoding of a file whose own name does not tell it.
        """
        return cls(read_tiktoken_vocabulary(name_or_path, kind))

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"<Tokenizer: {self.kind}, {self.vocab_size} tokens>"

    @property
    def encoder(self) -> Encoder:
        """What cuts and encodes the text; for looking at the steps (see `merges`)."""
        return self._vocabulary.encoder

    def encode(self, text: str, *, specials: bool = False, bos: bool = False) -> list[int]:
        """The ids of a text.

        With `specials`, control tokens written in the text become control tokens. With `bos`, the
        checkpoint's start token comes first, if it wants one and the text does not begin with it.
        """
        start = [self.bos_id] if bos and self.add_bos and self.bos_id is not None else []
        if not text:
            return start
        _check_text(text)
        self._check_characters(text, specials)
        ids = self._vocabulary.encoder.encode(text, specials=specials)
        return ids if specials and ids[:1] == start else start + ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, encoded on all cores; control tokens in them are text."""
        for text in texts:
            _check_text(text)
            self._check_characters(text, False)
        return self._vocabulary.encoder.encode_batch(texts)

    def missing_character(self, text: str, *, specials: bool = False) -> str | None:
        """The first character of a text that the vocabulary has no token for, and that would be
        left out; None: there is none, or an unknown token stands for it."""
        if not self._drops_characters:
            return None
        encoder, known = self._vocabulary.encoder, self._known_characters
        for part in encoder.parts(text, specials=specials):
            for character in part if isinstance(part, str) else ():
                if character not in known:
                    known[character] = has_character(encoder.library, character)
                if not known[character]:
                    return character
        return None

    @cached_property
    def _drops_characters(self) -> bool:
        return drops_characters(self._vocabulary.encoder.library)

    def _check_characters(self, text: str, specials: bool) -> None:
        missing = self.missing_character(text, specials=specials)
        if missing is None:
            return
        single = {self.token_text(n) for n in range(self.vocab_size) if n not in self.special_ids}
        listed = sorted(piece for piece in single if len(piece) == 1)
        shown = " ".join(repr(piece)[1:-1] if piece != " " else "' '" for piece in listed)
        allowed = (
            f"allowed are: {shown}" if len(listed) <= _MOST_LISTED else "leave it out of the text"
        )
        raise UnspoolError(
            f"the character {missing!r} is not in the model's vocabulary, and it has no token for "
            f"unknown ones; {allowed}"
        )

    def encode_prompt(self, text: str, *, specials: bool = False) -> list[int]:
        """The ids of a prompt: with the start token before it, if the checkpoint wants one."""
        return self.encode(text, specials=specials, bos=True)

    def decode(self, ids: Iterable[int], *, specials: bool = True) -> str:
        """The text of these ids; broken characters show as �. Without `specials`, control
        tokens are left out."""
        return self.decode_bytes(ids, specials=specials).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], *, specials: bool = True) -> bytes:
        """The exact bytes of these ids, as one whole text."""
        vocabulary = self._vocabulary
        pieces: list[bytes] = []
        at_start = vocabulary.leading_space
        for token in ids:
            data = self.token_bytes(token)
            if token in vocabulary.cut_out_ids:
                if specials or token not in self.special_ids:
                    pieces.append(data)
                # A start token is no text: the space that encoding adds comes behind it.
                control = token in self.special_ids
                at_start = vocabulary.space_after_added or (at_start and control)
                continue
            pieces.append(data.removeprefix(b" ") if at_start else data)
            at_start = False
        return b"".join(pieces)

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes that this token adds when it continues a text."""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._find_bytes(token)
        return data

    def token_text(self, token: int, begun: bytes = b"") -> str:
        """This token for people to read, behind a text that ends with the bytes of a character
        that is not whole yet; bytes that are no character stand in ⟨⟩."""
        return readable(self.token_bytes(token), begun)

    def token_id(self, text_or_piece: str) -> int | None:
        """The token written like this in the vocabulary, or the one whose text this is."""
        vocabulary = self._vocabulary
        found = vocabulary.id_of(text_or_piece)
        return vocabulary.id_of(vocabulary.text_piece(text_or_piece)) if found is None else found

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, for transformers and `from_file`."""
        save_vocabulary(self._vocabulary, folder)

    def gguf_metadata(self, size: int) -> dict[str, Any]:
        """The vocabulary in the words of a GGUF file, for a model with `size` logits."""
        return gguf_vocabulary(self._vocabulary, size)

    def _find_bytes(self, token: int) -> bytes:
        self._check(token)
        piece = self._vocabulary.piece(token)
        if piece is None:
            return b""  # a number between the tokens that the vocabulary leaves out
        if token in self._vocabulary.plain_text_ids:
            return text_bytes(piece)
        return self._vocabulary.piece_bytes(piece)

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise UnspoolError(
                f"token id {token} is not in the vocabulary; ids go from 0 to {self.vocab_size - 1}"
            )


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnspoolError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at position "
            f"{error.start}, which is half a character: repair or remove it"
        ) from None
