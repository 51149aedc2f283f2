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

from enum import Enum, auto

BLANK = " \t\r\n"


class Place(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_VALUE = auto()  # of an array, or its end
    NAME = auto()
    FIRST_NAME = auto()  # of an object, or its end
    COLON = auto()
    NEXT = auto()  # a comma, or the end of what encloses
    STRING = auto()
    NUMBER = auto()
    WORD = auto()  # true, false, null
    DONE = auto()


_BETWEEN = (Place.VALUE, Place.FIRST_VALUE, Place.NAME, Place.FIRST_NAME, Place.COLON, Place.NEXT)
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}

# A number, part by part: what may follow each part. "" is its beginning.
_DIGITS = "0123456789"
_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "zero", "123456789": "whole"},
    "zero": {".": "point", "eE": "power"},
    "whole": {_DIGITS: "whole", ".": "point", "eE": "power"},
    "point": {_DIGITS: "fraction"},
    "fraction": {_DIGITS: "fraction", "eE": "power"},
    "power": {"+-": "sign", _DIGITS: "exponent"},
    "sign": {_DIGITS: "exponent"},
    "exponent": {_DIGITS: "exponent"},
}
_WHOLE_NUMBERS = ("zero", "whole", "fraction", "exponent")


class JsonScan:
    """Reads one JSON value character by character."""

    __slots__ = ("_closers", "_escape", "_is_name", "_rest", "place")

    def __init__(self) -> None:
        self.place = Place.VALUE
        self._closers: list[str] = []  # of the objects and arrays that are open
        self._is_name = False  # whether the string being read is a name in an object
        self._escape = 0  # characters of an escape still to come; \uXXXX has five
        self._rest = ""  # what is left of a word; the part of a number

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._closers)

    @property
    def is_done(self) -> bool:
        return self.place is Place.DONE

    @property
    def is_name(self) -> bool:
        """Whether it is inside a string that is a name in an object."""
        return self.place is Place.STRING and self._is_name

    def take(self, character: str) -> bool:
        """Take one more character; False, and no change, where it cannot stand here."""
        place = self.place
        if place is Place.STRING:
            return self._string(character)
        if place is Place.NUMBER:
            return self._number(character)
        if place is Place.WORD:
            return self._word(character)
        if character in BLANK:
            return place in _BETWEEN
        if place in (Place.VALUE, Place.FIRST_VALUE):
            return self._value(character)
        if place in (Place.NAME, Place.FIRST_NAME):
            if character == '"':
                self.place, self._is_name = Place.STRING, True
                return True
            return place is Place.FIRST_NAME and self._close(character)
        if place is Place.COLON:
            if character == ":":
                self.place = Place.VALUE
            return character == ":"
        return place is Place.NEXT and self._next(character)

    def _value(self, character: str) -> bool:
        if character == '"':
            self.place, self._is_name = Place.STRING, False
        elif character == "{":
            self._closers.append("}")
            self.place = Place.FIRST_NAME
        elif character == "[":
            self._closers.append("]")
            self.place = Place.FIRST_VALUE
        elif character in _WORDS:
            self.place, self._rest = Place.WORD, _WORDS[character]
        elif character == "-" or (character.isascii() and character.isdigit()):
            part = {"-": "-", "0": "zero"}.get(character, "whole")
            self.place, self._rest = Place.NUMBER, part
        else:
            return self.place is Place.FIRST_VALUE and self._close(character)
        return True

    def _next(self, character: str) -> bool:
        if character == ",":
            self.place = Place.NAME if self._closers[-1] == "}" else Place.VALUE
            return True
        return self._close(character)

    def _close(self, character: str) -> bool:
        if character != self._closers[-1]:
            return False
        self._closers.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self.place = Place.NEXT if self._closers else Place.DONE

    def _string(self, character: str) -> bool:
        if self._escape == 1:  # right behind the backslash
            if character == "u":
                self._escape = 5
            elif character in '"\\/bfnrt':
                self._escape = 0
            return self._escape != 1
        if self._escape:
            if character not in "0123456789abcdefABCDEF":
                return False
            self._escape = self._escape - 1 if self._escape > 2 else 0
        elif character == "\\":
            self._escape = 1
        elif character == '"':
            if self._is_name:
                self.place = Place.COLON
            else:
                self._end_value()
        return True

    def _number(self, character: str) -> bool:
        for characters, part in _NUMBER[self._rest].items():
            if character in characters:
                self._rest = part
                return True
        if self._rest not in _WHOLE_NUMBERS or not self._closers:
            return False
        self.place = Place.NEXT  # a number ends where something else begins
        if character in BLANK or self._next(character):
            return True
        self.place = Place.NUMBER
        return False

    def _word(self, character: str) -> bool:
        if not self._rest.startswith(character):
            return False
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return True


def escaped(character: str) -> str:
    """A character of a string as JSON allows it: control characters as escapes."""
    return character if character >= " " else f"\\u{ord(character):04x}"
