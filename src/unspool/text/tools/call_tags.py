"""Calls that are written as tags (Qwen's newer way), made JSON as they arrive.

    <function=weather>
    <parameter=city>
    Ulm
    </parameter>
    </function>

A value stands as it is; whether it is a text or JSON is said by the function's schema. Texts pass
as they come, anything else when it is whole. The attributes are those of `CallObject`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unspool.text.tools.json_scan import BLANK

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_VALUE_END, _CALL_END = "</parameter>", "</function>"
_LONGEST_NAME = 128
_WORDS = {"True": "true", "False": "false", "None": "null"}

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the function's name


class TaggedCall:
    """One call as it is being written."""

    def __init__(self, schemas: Schemas) -> None:
        self.name: str | None = None
        self.fresh: list[str] = []
        self.is_done = False
        self._schemas = schemas
        self._state = self._read_head
        self._word = ""  # a tag, or in a text what may end it
        self._value: list[str] | None = None  # one that is no text, so far
        self._is_first = True  # of the arguments; of a text: its first character

    @property
    def has_arguments(self) -> bool:
        return self.is_done

    @property
    def is_certain(self) -> bool:
        return self.name is not None

    def take(self, character: str) -> bool:
        """Take one more character; False where it cannot stand here."""
        return self._state(character)

    def _read_head(self, character: str) -> bool:
        name = self._tag(character, _FUNCTION)
        if name:
            self.name, self._state = name, self._read_between
            self.fresh.append("{")
        return name is not None

    def _read_between(self, character: str) -> bool:
        """A parameter, or the end."""
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
        """The name in a tag once it is closed; "" before that; None: this is no such tag."""
        self._word += character
        if len(self._word) <= len(begin):
            return "" if begin.startswith(self._word) else None
        if character != ">":
            is_open = len(self._word) < len(begin) + _LONGEST_NAME and character not in "<\n"
            return "" if is_open else None
        name, self._word = self._word[len(begin) : -1].strip(), ""
        return name or None

    def _is_text(self, key: str) -> bool:
        schema = self._schemas.get(self.name or "")
        known = (schema or {}).get("properties", {}).get(key) if schema else None
        if not isinstance(known, Mapping):
            return True
        kinds = known.get("type")
        if kinds is None:
            choices = known.get("enum")
            return isinstance(choices, list) and all(isinstance(one, str) for one in choices)
        return bool(kinds == "string")

    def _read_value(self, character: str) -> bool:
        """What stands between the tags, without the line breaks beside these."""
        self._word += character
        if self._is_first and self._word == "\n":
            self._word = ""
            self._is_first = False
            return True
        self._is_first = False
        if self._word.endswith(_VALUE_END):
            rest, self._word = self._word[: -len(_VALUE_END)], ""
            self._add(rest.removesuffix("\n"))
            self._end_value()
            return True
        held = f"\n{_VALUE_END}"
        while self._word and not (held.startswith(self._word) or _VALUE_END.startswith(self._word)):
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
    """A value that is to be JSON; a text where it is none."""
    word = text.strip()
    word = _WORDS.get(word, word)
    try:
        return json.dumps(json.loads(word), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
