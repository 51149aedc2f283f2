"""Token bytes as readable text. A character split over several tokens appears with its last byte.

>>> leaf = "🍁".encode()
>>> readable(leaf[:2])  # no character yet: its bytes
'⟨F0 9F⟩'
>>> readable(leaf[2:], partial_utf8=leaf[:2])
'🍁'
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

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
