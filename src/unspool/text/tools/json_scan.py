"""Incremental JSON scanner: finds the end of a value that is still being written.

    scan = JsonScan()
    for character in '{"a": [1, 2]} and more':
        if not scan.push(character):
            break                       # this character is not valid here
        if scan.is_done:
            break                       # the value is complete

`json.loads` needs the complete text; called at every token it would take quadratic time. The
scanner reads each character once, in constant time, and reports invalid JSON immediately. It is
strict with one exception: it accepts control characters such as line breaks inside a string, which
models write and JSON forbids (see `escaped`).
"""

from __future__ import annotations

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
