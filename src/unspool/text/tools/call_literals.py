"""Incremental parser for tool calls with arguments as literals; converts them to JSON.

    gemma    call:weather{city:<|"|>Ulm<|"|>,days:[1,2],metric:true}
    python   weather(city='Ulm', days=[1, 2], metric=True)

It takes one character at a time and has the attributes of `CallObject`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from unspool.text.tools.json_scan import BLANK

QUOTE = '<|"|>'  # Gemma's: a control token, or its characters
_NAME = re.compile(r"[\w.:/-]{1,128}")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_MAX_BARE_CHARS = 128  # of a number or a word
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


@dataclass(frozen=True)
class LiteralSyntax:
    """The syntax of a call in one language."""

    opener: str
    closer: str
    key_end: str  # after the name of an argument
    quotes: tuple[str, ...]
    prefix: str = ""  # of the function's name
    words: Mapping[str, str] = field(default_factory=dict)
    escapes: bool = False  # a backslash is an escape


GEMMA = LiteralSyntax("{", "}", ":", (QUOTE,), prefix="call:")
PYTHON = LiteralSyntax(
    "(", ")", "=", ("'", '"'), words={"True": "true", "False": "false", "None": "null"},
    escapes=True,
)  # fmt: skip


class LiteralCallParser:
    """Parser of one call."""

    def __init__(self, dialect: LiteralSyntax) -> None:
        self.name: str | None = None
        self.fresh: list[str] = []
        self._dialect = dialect
        self._state = self._read_name
        self._word = ""  # a name, a key, a number; in a string: a possible end of it
        self._closers: list[str] = []
        self._needs_comma = False
        self._quote = ""  # ends the current string
        self._is_key = False  # whether the current string is a key
        self._escape = ""  # a backslash and the characters after it

    @property
    def is_done(self) -> bool:
        return self.name is not None and not self._closers

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments are complete."""
        return self.is_done

    @property
    def is_certain(self) -> bool:
        """Whether this is certainly a call: its arguments have started."""
        return self.name is not None

    def push(self, character: str) -> bool:
        """Parse one character; return False if it is not valid here."""
        return self._state(character)

    # -- values --------------------------------------------------------------------------------

    def _read_name(self, character: str) -> bool:
        dialect = self._dialect
        if character == dialect.opener:
            name = self._word.strip()
            if not name.startswith(dialect.prefix):
                return False
            name = name[len(dialect.prefix) :].strip()
            if _NAME.fullmatch(name) is None:
                return False
            self.name, self._word = name, ""
            return self._enter(dialect.closer, "{")
        self._word += character
        return len(self._word) < 140 and (character in BLANK or bool(_NAME.fullmatch(character)))

    def _enter(self, closer: str, json_text: str) -> bool:
        self._add(json_text)
        self._closers.append(closer)
        self._needs_comma = False
        self._state = self._read_value if closer == "]" else self._read_key
        return True

    def _add(self, text: str) -> None:
        """Emit JSON text that begins an element, with a comma if needed."""
        self.fresh.append(f", {text}" if self._needs_comma else text)

    def _close(self, character: str) -> bool:
        if not self._closers or character != self._closers[-1]:
            return False
        self._closers.pop()
        self.fresh.append("]" if character == "]" else "}")
        self._needs_comma = True
        self._state = self._read_after_value
        return True

    def _read_key(self, character: str) -> bool:
        if not self._word:
            if character in BLANK:
                return True
            if character == self._closers[-1]:
                return self._close(character)
            if self._begins_string(character):
                return self._enter_string(character, is_key=True)
        if character == self._key_end:
            key, self._word = self._word.strip(), ""
            self._add(f"{json.dumps(key, ensure_ascii=False)}: ")
            self._needs_comma = False
            self._state = self._read_value
            return bool(key)
        self._word += character
        return character not in ",{}[]()\n" and len(self._word) < _MAX_BARE_CHARS

    @property
    def _key_end(self) -> str:
        return self._dialect.key_end if len(self._closers) == 1 else ":"

    def _read_value(self, character: str) -> bool:
        if character in BLANK:
            return True
        if self._begins_string(character):
            return self._enter_string(character, is_key=False)
        if character in "{[":
            return self._enter("}" if character == "{" else "]", character)
        if character == "]" == self._closers[-1]:
            return self._close(character)
        self._word, self._state = character, self._read_bare
        return character not in ",:=)}"

    def _read_bare(self, character: str) -> bool:
        if character not in BLANK and character not in ",)]}":
            self._word += character
            return len(self._word) < _MAX_BARE_CHARS
        word, self._word = self._word, ""
        word = self._dialect.words.get(word, word)
        is_json = word in ("true", "false", "null") or _NUMBER.fullmatch(word)
        self._add(word if is_json else json.dumps(word, ensure_ascii=False))
        self._needs_comma, self._state = True, self._read_after_value
        return self._read_after_value(character)

    def _read_after_value(self, character: str) -> bool:
        if character in BLANK:
            return True
        if character == ",":
            self._state = self._read_value if self._closers[-1] == "]" else self._read_key
            return True
        return self._close(character)

    # -- strings ---------------------------------------------------------------------------------

    def _begins_string(self, character: str) -> bool:
        return any(quote[0] == character for quote in (*self._dialect.quotes, '"'))

    def _enter_string(self, character: str, *, is_key: bool) -> bool:
        quotes = (*self._dialect.quotes, '"')
        self._quote = next(quote for quote in quotes if quote[0] == character)
        self._is_key, self._word = is_key, character
        self._state = self._read_string if self._word == self._quote else self._read_quote
        return self._state == self._read_quote or self._open_string()

    def _read_quote(self, character: str) -> bool:
        """Read a quote of several characters."""
        self._word += character
        if not self._quote.startswith(self._word):
            return False
        return self._word != self._quote or self._open_string()

    def _open_string(self) -> bool:
        self._word, self._state = "", self._read_string
        self._add('"')
        return True

    def _read_string(self, character: str) -> bool:
        if self._escape:
            return self._read_escape(character)
        if character == "\\" and (self._dialect.escapes or self._quote == '"'):
            self._escape = character
            return True
        self._word += character
        if self._word == self._quote:
            self._word = ""
            self._end_string()
            return True
        while self._word and not self._quote.startswith(self._word):
            self.fresh.append(_inside(self._word[0]))
            self._word = self._word[1:]
        return True

    def _read_escape(self, character: str) -> bool:
        self._escape += character
        kind = self._escape[1]
        if kind in "xu" and (digits := self._escape[2:]) is not None:
            if digits and character not in "0123456789abcdefABCDEF":
                return False
            if len(digits) < (2 if kind == "x" else 4):
                return True
            self.fresh.append(f"\\u{int(digits, 16):04x}")
        else:
            self.fresh.append(_inside(_ESCAPES.get(kind, kind)))
        self._escape = ""
        return True

    def _end_string(self) -> None:
        self.fresh.append('"')
        self._needs_comma, self._state = True, self._read_after_value
        if self._is_key:
            self._needs_comma, self._state = False, self._read_colon

    def _read_colon(self, character: str) -> bool:
        if character in BLANK:
            return True
        self.fresh.append(": ")
        self._state = self._read_value
        return character == self._key_end


def _inside(text: str) -> str:
    """Escape characters for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
