"""Incremental parser for a tool call as a JSON object: its name, and its arguments as they arrive.

call = CallObject()
for character in '{"name": "weather", "arguments": {"city": "Ulm"}}':
    if not call.push(character):
        break                       # not a call
    if call.is_certain:
        call.fresh                  # arguments since the list was last emptied
"""

from __future__ import annotations

import json

from unspool.text.tools.json_scan import BLANK, JsonScanner, escaped

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
