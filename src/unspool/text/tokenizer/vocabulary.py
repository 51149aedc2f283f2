"""What every loader hands to `Tokenizer`: one vocabulary, wherever it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from unspool.text.tokenizer.encoders import Encoder
from unspool.text.tokenizer.pieces import PieceToBytes


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A vocabulary, read and checked."""

    kind: str
    size: int
    encoder: Encoder
    piece: Callable[[int], str | None]
    id_of: Callable[[str], int | None]
    piece_bytes: PieceToBytes
    text_piece: Callable[[str], str]  # how the vocabulary would write a token with this text
    plain_text_ids: frozenset[int] = frozenset()  # tokens whose piece is their text, unescaped
    cut_out_ids: frozenset[int] = frozenset()  # tokens that are found in the text as they are
    control: Mapping[str, int] = field(default_factory=dict)
    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | None = None
    # Encoding puts a space before the text, so decoding takes it off again: at the start, and
    # where `space_after_added` also behind each token that was cut out of the text.
    leading_space: bool = False
    space_after_added: bool = False
