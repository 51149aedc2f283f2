"""Convert between vocabulary pieces and the exact bytes they represent.

Three notations are in use. Byte-level vocabularies write each byte as one printable character
('Ġthe' is b' the'). SentencePiece vocabularies write ▁ for a space and <0xHH> for a single byte.
WordPiece marks pieces that continue a word ('##ing'), so the others begin with a space.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from functools import cache

SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

PieceToBytes = Callable[[str], bytes]


@cache
def byte_characters() -> tuple[str, ...]:
    """Return, by byte, the character that represents it in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    return tuple(characters[byte] for byte in range(256))


@cache
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def byte_level_piece(data: bytes) -> str:
    """Return the byte-level notation of some bytes."""
    characters = byte_characters()
    return "".join(characters[byte] for byte in data)


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level piece; other characters are encoded as UTF-8."""
    byte_by_character = _bytes_of_characters()
    try:
        return bytes([byte_by_character[character] for character in piece])
    except KeyError:
        return b"".join(
            bytes([byte_by_character[character]])
            if character in byte_by_character
            else text_bytes(character)
            for character in piece
        )


def byte_of(piece: str) -> int | None:
    """Return the byte of a piece such as <0x0A>, None for other pieces."""
    match = _BYTE_PIECE.match(piece)
    return int(match[1], 16) if match else None


def byte_fallback_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece with byte fallback: <0x0A> is a byte, ▁ a space."""
    byte = byte_of(piece)
    return bytes([byte]) if byte is not None else space_marked_bytes(piece)


def space_marked_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece: ▁ is a space."""
    return text_bytes(piece.replace(SPACE_MARK, " "))


def byte_level_text_piece(text: str) -> str:
    """Return the byte-level notation of a text."""
    return byte_level_piece(text_bytes(text))


def space_marked_text_piece(text: str) -> str:
    """Return the SentencePiece notation of a text."""
    return text.replace(" ", SPACE_MARK)


def suffixed_bytes(suffix: str) -> PieceToBytes:
    """Return a converter for vocabularies that mark word ends (</w>): the mark becomes a space."""
    return lambda piece: text_bytes(
        piece.removesuffix(suffix) + " " if suffix and piece.endswith(suffix) else piece
    )


def word_piece_bytes(mark: str) -> PieceToBytes:
    """Return a converter for WordPiece: pieces with the mark continue a word, others begin one."""
    return lambda piece: text_bytes(
        piece.removeprefix(mark) if piece.startswith(mark) else " " + piece
    )


def text_bytes(text: str) -> bytes:
    """Encode as UTF-8; lone surrogates from broken files become replacement characters."""
    return text.encode("utf-8", "replace")


_MAX_UTF8_BYTES = 4
_INVALID_BYTES = re.compile("[\udc80-\udcff]+")  # how `surrogateescape` decodes invalid UTF-8


def readable(piece: bytes, partial_utf8: bytes = b"") -> str:
    """Return a token's bytes as text, invalid UTF-8 as hex in ⟨⟩.

    `partial_utf8` holds the bytes of an incomplete character at the end of the previous text; a
    token that completes the character returns all of it.
    """
    if not partial_utf8:
        try:
            return piece.decode()
        except UnicodeDecodeError:
            pass
    elif piece and _is_text(partial_utf8 + piece[: _missing_bytes(partial_utf8)]):
        split = _missing_bytes(partial_utf8)
        return (partial_utf8 + piece[:split]).decode() + readable(piece[split:])
    return _INVALID_BYTES.sub(_hex, piece.decode("utf-8", "surrogateescape"))


def readable_pieces(pieces: Iterable[bytes]) -> list[str]:
    """Return `readable` text for the consecutive tokens of one text."""
    texts, partial_utf8 = [], b""
    for piece in pieces:
        texts.append(readable(piece, partial_utf8))
        partial_utf8 = incomplete_utf8(partial_utf8 + piece)
    return texts


def incomplete_utf8(text: bytes) -> bytes:
    """Return the bytes of an incomplete UTF-8 character at the end of a text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-_MAX_UTF8_BYTES:])
    return decoder.getstate()[0]


def _missing_bytes(partial_utf8: bytes) -> int:
    """Return the number of bytes missing from an incomplete character."""
    first_byte = partial_utf8[0]
    return (4 if first_byte >= 0xF0 else 3 if first_byte >= 0xE0 else 2) - len(partial_utf8)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _hex(match: re.Match[str]) -> str:
    return f"⟨{match[0].encode('utf-8', 'surrogateescape').hex(' ').upper()}⟩"
