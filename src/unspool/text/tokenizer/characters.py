"""Tokens for people to read: a character of several tokens is shown where its last byte comes.

>>> leaf = "🍁".encode()
>>> readable(leaf[:2])  # no character yet: its bytes
'⟨F0 9F⟩'
>>> readable(leaf[2:], begun=leaf[:2])
'🍁'
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

_LONGEST = 4  # bytes of a character in UTF-8
_BROKEN = re.compile("[\udc80-\udcff]+")  # how `surrogateescape` decodes what is no character


def readable(piece: bytes, begun: bytes = b"") -> str:
    """A token's bytes as text. With `begun`, the bytes of a character that the text before ends
    with, a token that completes it shows it whole. Bytes that are no character stand in ⟨⟩."""
    if not begun:
        try:
            return piece.decode()
        except UnicodeDecodeError:
            pass
    elif piece and _is_text(begun + piece[: _needed(begun)]):
        cut = _needed(begun)
        return (begun + piece[:cut]).decode() + readable(piece[cut:])
    return _BROKEN.sub(_hex, piece.decode("utf-8", "surrogateescape"))


def readable_pieces(pieces: Iterable[bytes]) -> list[str]:
    """`readable` for the tokens of one text, each behind those before it."""
    found, begun = [], b""
    for piece in pieces:
        found.append(readable(piece, begun))
        begun = unfinished(begun + piece)
    return found


def unfinished(text: bytes) -> bytes:
    """The bytes at the end of a text that begin a character and do not finish it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-_LONGEST:])
    return decoder.getstate()[0]


def _needed(begun: bytes) -> int:
    """How many bytes a character lacks, by its first byte."""
    first = begun[0]
    return (4 if first >= 0xF0 else 3 if first >= 0xE0 else 2) - len(begun)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _hex(bytes_of_none: re.Match[str]) -> str:
    return f"⟨{bytes_of_none[0].encode('utf-8', 'surrogateescape').hex(' ').upper()}⟩"
