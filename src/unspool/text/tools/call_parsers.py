"""Incremental parsers of tool calls: as JSON objects, in tags, as literals."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# -- Incremental JSON scanner: finds the end of a value that is still being written
#
#     scan = JsonScanner()
#     for character in '{"a": [1, 2]} and more':
#         if not scan.push(character):
#             break                       # this character is not valid here
#         if scan.is_done:
#             break                       # the value is complete
#
# `json.loads` needs the complete text; called at every token it would take quadratic time. The
# scanner reads each character once, in constant time, and reports invalid JSON immediately. It is
# strict with one exception: it accepts control characters such as line breaks inside a string,
# which models write and JSON forbids (see `escaped`).

BLANK = " \t\r\n"
_DIGITS = "0123456789"
_HEX = _DIGITS + "abcdefABCDEF"

# State -> character -> next state. "end" is the end of a value, "quoted" inside of a string.
_VALUE = {'"': "string", "{": "first name", "[": "first value", "-": "-", "0": "zero",
          "123456789": "whole", "t": "rue", "f": "alse", "n": "ull"}  # fmt: skip
_TABLE: dict[str, dict[str, str]] = {
    "value": _VALUE,
    "first value": _VALUE,  # of an array, or its end
    "name": {'"': "key"},
    "first name": {'"': "key"},  # of an object, or its end
    "colon": {":": "value"},
    "next": {",": "comma"},  # or the end of the object or array
    "done": {},
    "string": {'"': "end", "\\": "\\"},
    "key": {'"': "colon", "\\": "\\"},
    "\\": {'"\\/bfnrt': "quoted", "u": "u"},
    "u": {_HEX: "u1"}, "u1": {_HEX: "u2"}, "u2": {_HEX: "u3"}, "u3": {_HEX: "quoted"},
    "-": {"0": "zero", "123456789": "whole"},
    "zero": {".": "point", "eE": "power"},
    "whole": {_DIGITS: "whole", ".": "point", "eE": "power"},
    "point": {_DIGITS: "fraction"},
    "fraction": {_DIGITS: "fraction", "eE": "power"},
    "power": {"+-": "sign", _DIGITS: "exponent"},
    "sign": {_DIGITS: "exponent"},
    "exponent": {_DIGITS: "exponent"},
}  # fmt: skip
for _word in ("rue", "alse", "ull"):
    for _n in range(len(_word)):
        _TABLE[_word[_n:]] = {_word[_n]: _word[_n + 1 :] or "end"}
_STEPS = {state: {char: following for characters, following in row.items() for char in characters}
          for state, row in _TABLE.items()}  # fmt: skip
_BETWEEN = ("value", "first value", "name", "first name", "colon", "next")
_MAY_CLOSE = ("first value", "first name", "next")
_NUMBERS = ("zero", "whole", "fraction", "exponent")  # that may end here


class JsonScanner:
    """Scans one JSON value character by character; `state` says what may come next."""

    __slots__ = ("_closers", "_quoted", "state")

    def __init__(self) -> None:
        self.state = "value"
        self._closers: list[str] = []  # of the open objects and arrays
        self._quoted = ""  # "key" or "string": the state after an escape

    @property
    def depth(self) -> int:
        """Number of open objects and arrays."""
        return len(self._closers)

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    @property
    def in_string(self) -> bool:
        return self.state in ("string", "key", "\\", "u", "u1", "u2", "u3")

    def push(self, character: str) -> bool:
        """Scan one character; return False, without change, if it is not valid here."""
        state, closers = self.state, self._closers
        following = _STEPS[state].get(character)
        if following is None:
            if state in ("string", "key") or (character in BLANK and state in _BETWEEN):
                return True
            if state in _NUMBERS and closers:  # a number ends where something else begins
                self.state = "next"
                if self.push(character):
                    return True
                self.state = state
            if state not in _MAY_CLOSE or character != closers[-1]:
                return False
            closers.pop()
            following = "end"
        elif following in ("string", "key"):
            self._quoted = following
        elif following in ("first name", "first value"):
            closers.append("}" if character == "{" else "]")
        elif following == "quoted":
            following = self._quoted
        elif following == "comma":
            following = "name" if closers[-1] == "}" else "value"
        if following == "end":
            following = "next" if closers else "done"
        self.state = following
        return True


def escaped(character: str) -> str:
    """Return a string character as valid JSON: control characters as escapes."""
    return character if character >= " " else f"\\u{ord(character):04x}"


# -- Incremental parser for a tool call as a JSON object

_ARGUMENTS = ("arguments", "parameters")  # models write either, independent of the template
_ALLOWED_KEYS = ("name", "type", "id", *_ARGUMENTS)  # of a call without a mark


class JsonCallParser:
    """{"name": ..., "arguments": {...}}, in any order; or, given the name, the arguments alone."""

    def __init__(self, name: str | None = None, *, strict: bool = False) -> None:
        self.name = name
        self.fresh: list[str] = []  # new text of the arguments, emptied by the caller
        self.has_arguments = False  # the arguments are complete
        self._strict = strict
        self._scan = JsonScanner()
        self._outside = 0 if name is not None else 1  # nesting depth outside the arguments
        self._in_arguments = name is not None
        self._key = ""
        self._string: list[str] = []  # the current key or string value

    @property
    def is_done(self) -> bool:
        return self._scan.is_done

    @property
    def is_certain(self) -> bool:
        """Whether this is certainly a call: it has a name, and its arguments have started."""
        return self.name is not None and (self._in_arguments or self.has_arguments)

    def push(self, character: str) -> bool:
        """Parse one character; return False if it is not valid here."""
        scan = self._scan
        in_string, depth = scan.in_string, scan.depth
        begins = depth == 1 and scan.state == "value" and character not in BLANK
        if begins and not self._in_arguments and not self._may_begin(character):
            return False
        if not scan.push(character):
            return False
        if self._in_arguments:
            self.fresh.append(escaped(character) if in_string else character)
            if scan.depth == self._outside:
                self._in_arguments, self.has_arguments = False, True
        elif depth == 1:
            self._read_string(character, in_string)
        return True

    def _may_begin(self, character: str) -> bool:
        """Return whether the key's value may begin with this; arguments are an object."""
        if self._key == "name":
            return character == '"' and self.name is None
        if self._key in _ARGUMENTS and not self.has_arguments and character != "n":  # null: none
            self._in_arguments = character == "{"
            return self._in_arguments
        return not self._strict or self._key in _ALLOWED_KEYS

    def _read_string(self, character: str, in_string: bool) -> None:
        """Collect the keys of the object and the name."""
        if not in_string:
            self._string = []
        elif self._scan.in_string:
            self._string.append(escaped(character))
        else:
            text: str = json.loads(f'"{"".join(self._string)}"')
            if self._scan.state == "colon":
                self._key = text
            elif self._key == "name":
                self.name = text


# -- Incremental parser for tool calls written as tags (Qwen3-Coder); converts them to JSON

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_VALUE_END, _CALL_END = "</parameter>", "</function>"
_MAX_NAME_CHARS = 128
_WORDS = {"True": "true", "False": "false", "None": "null"}

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by function name


class TaggedCallParser:
    """Parser of one call."""

    def __init__(self, schemas: Schemas) -> None:
        self.name: str | None = None
        self.fresh: list[str] = []
        self.is_done = False
        self._schemas = schemas
        self._state = self._read_head
        self._word = ""  # a tag; in a string: a possible end of it
        self._value: list[str] | None = None  # the current value if it is not a string
        self._is_first = True  # the next argument, or the next character of a value, is the first

    @property
    def has_arguments(self) -> bool:
        return self.is_done

    @property
    def is_certain(self) -> bool:
        return self.name is not None

    def push(self, character: str) -> bool:
        """Parse one character; return False if it is not valid here."""
        return self._state(character)

    def _read_head(self, character: str) -> bool:
        name = self._tag(character, _FUNCTION)
        if name:
            self.name, self._state = name, self._read_between
            self.fresh.append("{")
        return name is not None

    def _read_between(self, character: str) -> bool:
        """Read a parameter tag or the end tag."""
        if not self._word and character in BLANK:
            return True
        if _CALL_END.startswith(self._word + character):
            self._word += character
            if self._word == _CALL_END:
                self.fresh.append("}")
                self.is_done = True
            return True
        key = self._tag(character, _PARAMETER)
        if key:
            comma = "" if self._is_first else ", "
            self.fresh.append(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            self._value = None if self._is_text(key) else []
            if self._value is None:
                self.fresh.append('"')
            self._is_first, self._state = True, self._read_value
        return key is not None

    def _tag(self, character: str, begin: str) -> str | None:
        """Return the name in a tag once it is closed, "" before, None if it is another tag."""
        self._word += character
        if len(self._word) <= len(begin):
            return "" if begin.startswith(self._word) else None
        if character != ">":
            is_open = len(self._word) < len(begin) + _MAX_NAME_CHARS and character not in "<\n"
            return "" if is_open else None
        name, self._word = self._word[len(begin) : -1].strip(), ""
        return name or None

    def _is_text(self, key: str) -> bool:
        schema = self._schemas.get(self.name or "")
        property_schema = (schema or {}).get("properties", {}).get(key) if schema else None
        if not isinstance(property_schema, Mapping):
            return True
        kind = property_schema.get("type")
        if kind is None:
            choices = property_schema.get("enum")
            return isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
        return bool(kind == "string")

    def _read_value(self, character: str) -> bool:
        """Read the text between the tags, without the line breaks next to them."""
        self._word += character
        if self._is_first and self._word == "\n":
            self._word = ""
            self._is_first = False
            return True
        self._is_first = False
        if self._word.endswith(_VALUE_END):
            value, self._word = self._word[: -len(_VALUE_END)], ""
            self._add(value.removesuffix("\n"))
            self._end_value()
            return True
        end_mark = f"\n{_VALUE_END}"
        while self._word and not (
            end_mark.startswith(self._word) or _VALUE_END.startswith(self._word)
        ):
            self._add(self._word[0])
            self._word = self._word[1:]
        return True

    def _add(self, text: str) -> None:
        if self._value is not None:
            self._value.append(text)
        elif text:
            self.fresh.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end_value(self) -> None:
        if self._value is None:
            self.fresh.append('"')
        else:
            self.fresh.append(_as_json("".join(self._value)))
        self._is_first, self._state = False, self._read_between


def _as_json(text: str) -> str:
    """Return the value if it is JSON, else as a JSON string."""
    word = text.strip()
    word = _WORDS.get(word, word)
    try:
        return json.dumps(json.loads(word), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


# -- Incremental parser for tool calls with arguments as literals; converts them to JSON

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
