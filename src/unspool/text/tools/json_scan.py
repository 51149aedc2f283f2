"""Where a JSON value ends, while it is still being written.

    scan = JsonScan()
    for character in '{"a": [1, 2]} and more':
        if not scan.take(character):
            break                       # this character cannot stand here
        if scan.is_done:
            break                       # the value is complete

`json.loads` wants the whole text; asked again at every token it would take quadratic time. This
takes each character once, in constant time, and says at once when the text is no JSON any more.
It is exact about JSON's form, with one allowance: a line break or another control character inside
a string, which models write and JSON forbids, is taken (see `escaped`).
"""

from __future__ import annotations

BLANK = " \t\r\n"
_DIGITS = "0123456789"
_HEX = _DIGITS + "abcdefABCDEF"

# State -> what may come -> next state. "end" is the end of a value, "quoted" inside of a string.
_VALUE = {'"': "string", "{": "first name", "[": "first value", "-": "-", "0": "zero",
          "123456789": "whole", "t": "rue", "f": "alse", "n": "ull"}  # fmt: skip
_TABLE: dict[str, dict[str, str]] = {
    "value": _VALUE,
    "first value": _VALUE,  # of an array, or its end
    "name": {'"': "key"},
    "first name": {'"': "key"},  # of an object, or its end
    "colon": {":": "value"},
    "next": {",": "comma"},  # or the end of what encloses
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
_STEPS = {state: {each: following for characters, following in row.items() for each in characters}
          for state, row in _TABLE.items()}  # fmt: skip
_BETWEEN = ("value", "first value", "name", "first name", "colon", "next")
_MAY_CLOSE = ("first value", "first name", "next")
_NUMBERS = ("zero", "whole", "fraction", "exponent")  # that may end here


class JsonScan:
    """Reads one JSON value character by character; `state` says what may come next."""

    __slots__ = ("_closers", "_quoted", "state")

    def __init__(self) -> None:
        self.state = "value"
        self._closers: list[str] = []  # of the objects and arrays that are open
        self._quoted = ""  # "key" or "string", to go back to behind an escape

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._closers)

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    @property
    def in_string(self) -> bool:
        return self.state in ("string", "key", "\\", "u", "u1", "u2", "u3")

    def take(self, character: str) -> bool:
        """Take one more character; False, and no change, where it cannot stand here."""
        state, closers = self.state, self._closers
        following = _STEPS[state].get(character)
        if following is None:
            if state in ("string", "key") or (character in BLANK and state in _BETWEEN):
                return True
            if state in _NUMBERS and closers:  # a number ends where something else begins
                self.state = "next"
                if self.take(character):
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
    """A character of a string as JSON allows it: control characters as escapes."""
    return character if character >= " " else f"\\u{ord(character):04x}"
