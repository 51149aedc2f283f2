"""The JSON object of one call, while it is being written: when its name is known, when its
arguments begin and end, and what has come of them.

    call = CallObject()
    for character in '{"name": "weather", "arguments": {"city": "Ulm"}}':
        if not call.take(character):
            break                       # no call
        if call.is_certain:
            call.fresh                  # of the arguments: what came since it was last emptied
"""

from __future__ import annotations

import json

from unspool.text.tools.json_scan import BLANK, JsonScan, escaped

_ARGUMENTS = ("arguments", "parameters")  # models write either, whatever their template says
_BESIDE = ("name", "type", "id", *_ARGUMENTS)  # what a call without a mark may hold


class CallObject:
    """{"name": ..., "arguments": {...}}, in any order; or, given the name, the arguments alone."""

    def __init__(self, name: str | None = None, *, strict: bool = False) -> None:
        self.name = name
        self.fresh: list[str] = []  # of the arguments: what was not yet taken
        self.has_arguments = False  # all of them
        self._strict = strict
        self._scan = JsonScan()
        self._outside = 0 if name is not None else 1  # how deep it is around the arguments
        self._in_arguments = name is not None
        self._key = ""
        self._string: list[str] = []  # a key or a value of the object, as it is written

    @property
    def is_done(self) -> bool:
        return self._scan.is_done

    @property
    def is_certain(self) -> bool:
        """Whether this is a call: it has a name, and its arguments have begun."""
        return self.name is not None and (self._in_arguments or self.has_arguments)

    def take(self, character: str) -> bool:
        """Take one more character; False where it cannot stand here."""
        scan = self._scan
        in_string, depth = scan.in_string, scan.depth
        begins = depth == 1 and scan.state == "value" and character not in BLANK
        if begins and not self._in_arguments and not self._may_begin(character):
            return False
        if not scan.take(character):
            return False
        if self._in_arguments:
            self.fresh.append(escaped(character) if in_string else character)
            if scan.depth == self._outside:
                self._in_arguments, self.has_arguments = False, True
        elif depth == 1:
            self._read_string(character, in_string)
        return True

    def _may_begin(self, character: str) -> bool:
        """Whether the value of the key may begin so; arguments are an object."""
        if self._key == "name":
            return character == '"' and self.name is None
        if self._key in _ARGUMENTS and not self.has_arguments and character != "n":  # null: none
            self._in_arguments = character == "{"
            return self._in_arguments
        return not self._strict or self._key in _BESIDE

    def _read_string(self, character: str, in_string: bool) -> None:
        """Collect the strings of the object: its keys, and the name."""
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
