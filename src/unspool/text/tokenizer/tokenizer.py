"""Text to token ids and back: one `Tokenizer` for every kind of vocabulary.

    tokenizer = Tokenizer.from_file("folder/with/tokenizer.json")
    tokenizer = Tokenizer.from_gguf(metadata)
    tokenizer = Tokenizer.from_tiktoken("cl100k")
    ids = tokenizer.encode("Why do leaves change color in fall?")
    tokenizer.decode(ids)

Every token has exact bytes, and a text is those bytes joined. Control tokens written in a text
(`<|im_end|>`) are encoded as text unless `specials=True`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unspool.errors import UnspoolError
from unspool.text.tokenizer.gguf import read_gguf_vocabulary, vocabulary_metadata
from unspool.text.tokenizer.pieces import readable, text_bytes
from unspool.text.tokenizer.vocabulary import Encoder, Vocabulary

_MAX_LISTED_CHARACTERS = 100  # in an error message


class Tokenizer:
    """Turns text into token ids and ids into exact bytes. Thread-safe.

    Attributes:
        kind: Algorithm of the vocabulary: byte-pair encoding, WordPiece, unigram, ...
        vocab_size: Number of token ids.
        bos_id: Id of the start token, None if there is none.
        eos_id: Id of the end token, None if there is none.
        unk_id: Id of the unknown token, None if there is none.
        pad_id: Id of the padding token, None if there is none.
        add_bos: Whether a prompt starts with the start token.
        add_eos: Whether the checkpoint ends texts with the end token.
        end_ids: Ids that end a generated text.
        special_tokens: Control tokens: text to id.
        special_ids: Ids of the control tokens.
        chat_template: The Jinja template of the checkpoint, None if there is none.
    """

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
        """Load a tokenizer.json, or a folder with one and its companion files."""
        from unspool.text.tokenizer.huggingface import read_tokenizer_json

        return cls(read_tokenizer_json(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the metadata of a GGUF file."""
        return cls(read_gguf_vocabulary(metadata))

    @classmethod
    def from_tiktoken(cls, name_or_path: str | Path, *, kind: str | None = None) -> Tokenizer:
        """Load OpenAI's ranks: 'cl100k', 'o200k', 'gpt2', or the path of a .tiktoken file.

        `kind` names the encoding if the file's name does not.
        """
        from unspool.text.tokenizer.tiktoken import read_tiktoken_vocabulary

        return cls(read_tiktoken_vocabulary(name_or_path, kind))

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"<Tokenizer: {self.kind}, {self.vocab_size} tokens>"

    @property
    def encoder(self) -> Encoder:
        """The encoder, for inspecting its steps (see `merges`)."""
        return self._vocabulary.encoder

    def encode(self, text: str, *, specials: bool = False, bos: bool = False) -> list[int]:
        """Return the ids of a text.

        With `specials`, control tokens written in the text become control tokens. With `bos`, the
        start token comes first, if the checkpoint uses one and the text does not begin with it.
        """
        start = [self.bos_id] if bos and self.add_bos and self.bos_id is not None else []
        if not text:
            return start
        _check_text(text)
        self._check_characters(text, specials)
        ids = self._vocabulary.encoder.encode(text, specials=specials)
        return ids if specials and ids[:1] == start else start + ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, encoded on all cores; control tokens in them are text."""
        for text in texts:
            _check_text(text)
            self._check_characters(text, False)
        return self._vocabulary.encoder.encode_batch(texts)

    def missing_character(self, text: str, *, specials: bool = False) -> str | None:
        """Return the first character that encoding would drop, None if there is none.

        Characters are dropped if the vocabulary has neither a token for them nor an unknown token.
        """
        encoder, has_token = self._vocabulary.encoder, self._known_characters
        if not encoder.drops_characters:
            return None
        for part in encoder.parts(text, specials=specials):
            for character in part if isinstance(part, str) else ():
                if character not in has_token:
                    has_token[character] = encoder.has_character(character)
                if not has_token[character]:
                    return character
        return None

    def _check_characters(self, text: str, specials: bool) -> None:
        missing = self.missing_character(text, specials=specials)
        if missing is None:
            return
        single = {self.token_text(n) for n in range(self.vocab_size) if n not in self.special_ids}
        listed = sorted(piece for piece in single if len(piece) == 1)
        listing = " ".join(repr(piece)[1:-1] if piece != " " else "' '" for piece in listed)
        allowed = (
            f"allowed are: {listing}"
            if len(listed) <= _MAX_LISTED_CHARACTERS
            else "leave it out of the text"
        )
        raise UnspoolError(
            f"the character {missing!r} is not in the model's vocabulary, which has no unknown "
            f"token; {allowed}"
        )

    def encode_prompt(self, text: str, *, specials: bool = False) -> list[int]:
        """Return the ids of a prompt, with the start token if the checkpoint uses one."""
        return self.encode(text, specials=specials, bos=True)

    def decode(self, ids: Iterable[int], *, specials: bool = True) -> str:
        """Return the text of the ids; invalid UTF-8 shows as �.

        Without `specials`, control tokens are left out.
        """
        return self.decode_bytes(ids, specials=specials).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], *, specials: bool = True) -> bytes:
        """Return the exact bytes of the ids."""
        vocabulary = self._vocabulary
        pieces: list[bytes] = []
        at_start = vocabulary.leading_space
        for token in ids:
            data = self.token_bytes(token)
            if token in vocabulary.split_token_ids:
                if specials or token not in self.special_ids:
                    pieces.append(data)
                # The space that encoding adds comes after the start token.
                control = token in self.special_ids
                at_start = vocabulary.space_after_added or (at_start and control)
                continue
            pieces.append(data.removeprefix(b" ") if at_start else data)
            at_start = False
        return b"".join(pieces)

    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes that a token adds to a text."""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._compute_bytes(token)
        return data

    def token_text(self, token: int, partial_utf8: bytes = b"") -> str:
        """Return a token as readable text; see `readable` for `partial_utf8` and invalid bytes."""
        return readable(self.token_bytes(token), partial_utf8)

    def token_id(self, text_or_piece: str) -> int | None:
        """Return the token with this piece in the vocabulary, or with this text."""
        vocabulary = self._vocabulary
        token = vocabulary.id_of(text_or_piece)
        return vocabulary.id_of(vocabulary.text_piece(text_or_piece)) if token is None else token

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, for transformers and `from_file`."""
        from unspool.text.tokenizer.huggingface import save_vocabulary

        save_vocabulary(self._vocabulary, folder)

    def gguf_metadata(self, size: int) -> dict[str, Any]:
        """Return the `tokenizer.*` metadata of a GGUF file for a model with `size` logits."""
        return vocabulary_metadata(self._vocabulary, size)

    def _compute_bytes(self, token: int) -> bytes:
        self._check(token)
        piece = self._vocabulary.piece(token)
        if piece is None:
            return b""  # an unused id
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
            f"{error.start}: repair or remove it"
        ) from None
