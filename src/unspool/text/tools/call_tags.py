"""Incremental parser for tool calls written as tags (Qwen3-Coder); converts them to JSON.

    <function=weather>
    <parameter=city>
    Ulm
    </parameter>
    </function>

Values are written without quotes; the function's schema says whether a value is a string or JSON.
Strings pass as they arrive, other values when complete. The attributes are those of `CallObject`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unspool.text.tools.json_scan import BLANK

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
