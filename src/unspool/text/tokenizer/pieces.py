"""What a vocabulary writes for a token, and the exact bytes that it stands for.

Three ways of writing are in use. Byte-level vocabularies show each byte as one printable
character ('Ġthe' is b' the'). SentencePiece vocabularies write ▁ for a space and <0xHH> for a
single byte. WordPiece marks the pieces that continue a word ('##ing'), so the others begin with a
space.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

PieceToBytes = Callable[[str], bytes]


@cache
def byte_characters() -> tuple[str, ...]:
    """For each byte the character that stands for it in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    shown = {byte: chr(byte) for byte in printable}
    shown |= {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    return tuple(shown[byte] for byte in range(256))


@cache
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def byte_level_piece(data: bytes) -> str:
    """How a byte-level vocabulary writes these bytes."""
    shown = byte_characters()
    return "".join(shown[byte] for byte in data)


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a byte-level piece; a character outside that alphabet is kept as it is."""
    known = _bytes_of_characters()
    try:
        return bytes([known[character] for character in piece])
    except KeyError:
        return b"".join(
            bytes([known[character]]) if character in known else text_bytes(character)
            for character in piece
        )


def byte_of(piece: str) -> int | None:
    """The byte that a piece such as <0x0A> stands for."""
    match = _BYTE_PIECE.match(piece)
    return int(match[1], 16) if match else None


def byte_fallback_bytes(piece: str) -> bytes:
    """SentencePiece with byte fallback: <0x0A> is that byte, ▁ is a space."""
    byte = byte_of(piece)
    return bytes([byte]) if byte is not None else space_marked_bytes(piece)


def space_marked_bytes(piece: str) -> bytes:
    """SentencePiece: ▁ is a space."""
    return text_bytes(piece.replace(SPACE_MARK, " "))


def byte_level_text_piece(text: str) -> str:
    """How a byte-level vocabulary writes this text."""
    return byte_level_piece(text_bytes(text))


def space_marked_text_piece(text: str) -> str:
    """How a SentencePiece vocabulary writes this text."""
    return text.replace(" ", SPACE_MARK)


def suffixed_bytes(suffix: str) -> PieceToBytes:
    """Vocabularies that mark the end of a word, such as </w>: the mark is the space behind it."""
    return lambda piece: text_bytes(
        piece.removesuffix(suffix) + " " if suffix and piece.endswith(suffix) else piece
    )


def word_piece_bytes(continues: str) -> PieceToBytes:
    """WordPiece: pieces with the mark continue a word, all others begin one."""
    return lambda piece: text_bytes(
        piece.removeprefix(continues) if piece.startswith(continues) else " " + piece
    )


def text_bytes(text: str) -> bytes:
    """Plain UTF-8; what a broken file may hold beside it becomes a replacement mark."""
    return text.encode("utf-8", "replace")
