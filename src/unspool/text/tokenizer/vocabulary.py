"""The common form of a vocabulary that all loaders return and `Tokenizer` uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from unspool.text.tokenizer.encoders import Encoder
from unspool.text.tokenizer.pieces import PieceToBytes


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A validated vocabulary."""

    kind: str
    size: int
    encoder: Encoder
    piece: Callable[[int], str | None]
    id_of: Callable[[str], int | None]
    piece_bytes: PieceToBytes
    text_piece: Callable[[str], str]  # the piece of a token with this text
    plain_text_ids: frozenset[int] = frozenset()  # tokens whose piece is their text, unescaped
    split_token_ids: frozenset[int] = frozenset()  # tokens split off before encoding
    control: Mapping[str, int] = field(default_factory=dict)
    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | None = None
    # Encoding adds a space before the text and decoding removes it: at the start, and with
    # `space_after_added` also after each token that was split off.
    leading_space: bool = False
    space_after_added: bool = False
