"""Output constraints: JSON schema, regex, choice, Lark or GBNF grammar.

    GrammarSpec.json_schema({"type": "object", ...})     # or a pydantic class, or JSON text
    GrammarSpec.json()                                   # any JSON object
    GrammarSpec.regex(r"[A-Z]{3}-\\d{4}")                 # matches the whole text
    GrammarSpec.choice(["yes", "no"])
    GrammarSpec.lark('start: "a" | "b" start')           # llguidance's dialect
    GrammarSpec.gbnf('root ::= "a" | "b" root')          # llama.cpp's

Each becomes a Lark grammar, which `Grammar` compiles. Oversized grammars are rejected here: the
compiler limits its steps, but its parsing time is quadratic in the length, and a long chain of
rules overflows its stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from unspool.errors import SettingsError
from unspool.sampling.json_schema import SchemaError, prepare_schema

Kind = Literal["json", "json_schema", "regex", "choice", "lark", "gbnf"]

_KIND_NAMES: dict[Kind, str] = {
    "json": "JSON",
    "json_schema": "JSON schema",
    "regex": "regex",
    "choice": "choice",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
}
_MAX_LENGTH: dict[Kind, int] = {
    "json": 0,
    "json_schema": 100_000,
    "regex": 10_000,
    "choice": 1_000_000,
    "lark": 32_000,
    "gbnf": 32_000,
}
_MAX_CHOICES = 20_000
_MAX_RULES = 1_000  # rules or $ref targets: each may be one level of recursion
_MAX_SCHEMA_STRING = 10_000  # characters of a string: it may be a pattern

_WHITESPACE = r"\x20|\n\x20{0,40}"
"""Whitespace in JSON: none, a space, or a newline with indentation. With arbitrary whitespace a
confused model writes blanks forever."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""The mask must depend on the text only. Otherwise, where only one text can follow, llguidance
allows only one tokenization of it, and allowed tokens would differ from the mask."""

_RULE = re.compile(r"\b\w+\s*(?:\[[^\]\n]*\]|\{[^}\n]*\})?\s*:(?!:)|::=")
_REF = re.compile(r'"\$ref"\s*:\s*("(?:[^"\\]|\\.)*")')
# The compiler's messages about a schema, and messages for its author.
_SCHEMA_MESSAGES = {
    r"^Unimplemented keys: \[(.*)\]$": r"it uses \1, which is not supported; remove it",
    r"^Unsatisfiable schema: ": "no value can satisfy it: ",
    r"^Invalid type: (.*)$": r"it has the type '\1'; allowed: object, array, string, number,"
    " integer, boolean, null",
    r"^Anchor '(.*)' does not exist$": r"it refers to '#\1', which does not exist",
    r"^look-around, .* is not supported$": "look-around in a pattern is not supported;"
    " describe the whole text instead",
}
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.S)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint: kind and source. Equal specs are compiled once."""

    kind: Kind
    source: str = ""
    notes: tuple[str, ...] = field(default=(), compare=False)  # what is not enforced

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise SettingsError(
                f"unknown kind of grammar {self.kind!r}; allowed: {', '.join(get_args(Kind))}"
            )
        if not isinstance(self.source, str):
            raise SettingsError(
                f"{self._label()} must be a string, got {type(self.source).__name__}"
            )
        max_length = _MAX_LENGTH[self.kind] or len(self.source)
        length = len(self.source)
        if length > max_length:
            raise SettingsError(
                f"{self._label()} has {length:,} characters; the maximum is {max_length:,}"
            )
        try:
            self.source.encode("utf-8")
        except UnicodeEncodeError:
            raise SettingsError(f"{self._label()} contains a lone surrogate") from None

    @classmethod
    def json(cls) -> GrammarSpec:
        """Any JSON object."""
        return cls("json")

    @classmethod
    def json_schema(cls, schema: Any) -> GrammarSpec:
        """JSON of a schema: a dict, JSON text, or a class with `model_json_schema`.

        Objects have only the properties that the schema names (see `json_schema.py`).
        """
        describe = getattr(schema, "model_json_schema", None)
        if callable(describe):  # a pydantic class
            schema = describe()
        try:
            if isinstance(schema, str | bytes):
                schema = json.loads(schema)
            spec = cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"the JSON schema is not JSON: {_one_line(str(error))}") from None
        if not isinstance(schema, dict | bool):
            kind = type(schema).__name__
            raise SettingsError(f"the JSON schema must be an object or true, got {kind}")
        try:
            prepared, notes = prepare_schema(json.loads(spec.source))
        except SchemaError as error:
            raise spec.error(f"it {error}") from None
        except RecursionError:
            raise spec.error("it is nested too deep") from None
        return cls("json_schema", json.dumps(prepared), tuple(notes))

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that a regular expression matches completely.

        Look-around and back references are not supported. `\\d` matches ASCII digits only.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> GrammarSpec:
        """One of several strings."""
        is_list = isinstance(choices, Iterable) and not isinstance(choices, str | bytes)
        strings = list(choices) if is_list else None
        if strings is None or not all(isinstance(choice, str) for choice in strings):
            raise SettingsError("the choice must be a list of strings")
        return cls("choice", json.dumps(strings, ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> GrammarSpec:
        """A grammar in llguidance's dialect of Lark; its start rule is `start`."""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> GrammarSpec:
        """A grammar in llama.cpp's GBNF; its start rule is `root`."""
        return cls("gbnf", text)

    def error(self, why: str) -> SettingsError:
        """Error for a grammar that cannot be compiled, in one line."""
        if self.kind in ("json", "json_schema", "choice"):
            return SettingsError(f"{self._label()} cannot be used: {why}")
        return SettingsError(f"{self._label()} {_shorten(self.source)} cannot be used: {why}")

    def error_from(self, message: str) -> SettingsError:
        """Error with the essential part of the compiler's message, which has many lines."""
        alternatives = message.strip().splitlines() or ["no reason given"]
        match = re.search(r"^error: (.+)$", message, re.MULTILINE)  # of the regex parser
        summary = match[1] if match else alternatives[0]
        summary = re.sub(r"^panic: ", "it is too large, or of a form not supported: ", summary)
        if self.kind not in ("lark", "gbnf"):  # positions in a grammar that the user has not seen
            summary = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", summary)
        if self.kind == "json_schema":
            for pattern, message in _SCHEMA_MESSAGES.items():
                summary = re.sub(pattern, message, summary)
        return self.error(_one_line(summary))

    def to_lark(self) -> str:
        """Convert to a Lark grammar. Raises SettingsError if that is not possible."""
        if self.kind == "json":
            return _schema_to_lark({"type": "object"})
        if self.kind == "json_schema":
            return self._schema_lark()
        if self.kind == "regex":
            from llguidance import regex_to_lark

            if re.search(r"(?<!\\)(\\\\)*\\\Z", self.source):
                raise self.error("it ends in a lone backslash")  # it would escape the /
            pattern = regex_to_lark(self.source, use_ascii="d")
            return f"start: /{pattern or '(?:)'}/{_NO_FORCING}"  # // would start a comment
        if self.kind == "choice":
            return self._choice_lark()
        self._check_count("rules", len(_RULE.findall(self.source)))
        text = self._gbnf_lark() if self.kind == "gbnf" else self.source
        self._check_count("different $refs", len(set(_REF.findall(text))))
        return text + _NO_FORCING

    def _schema_lark(self) -> str:
        try:
            schema = json.loads(self.source)
        except (ValueError, RecursionError) as error:
            raise self.error(_one_line(str(error))) from None
        self._check_count("different $refs", len(set(_REF.findall(json.dumps(schema)))))
        if any(len(text) > _MAX_SCHEMA_STRING for text in _strings(schema)):
            raise self.error(f"it contains a string of more than {_MAX_SCHEMA_STRING:,} characters")
        return _schema_to_lark(schema)

    def _choice_lark(self) -> str:
        try:
            choices = json.loads(self.source)
        except (ValueError, RecursionError):
            choices = None
        if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
            raise self.error("it must be a list of strings")
        if not choices:
            raise self.error("it is empty; at least one string is required")
        self._check_count("strings", len(choices), _MAX_CHOICES)
        alternatives = "|".join(_escape_regex(text) for text in dict.fromkeys(choices))
        return f"start: /(?:{alternatives})/{_NO_FORCING}"

    def _gbnf_lark(self) -> str:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        def unescape(match: re.Match[str]) -> str:
            """Replace an escape by its character: the converter breaks some escapes."""
            digits = match[1] or match[2] or match[3]
            if digits is None:
                return match[0]
            code = int(digits, 16)
            if code < 0x80:
                return f"\\x{code:02x}"
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self.error(f"{match[0]} is not a character")
            return chr(code)

        text = _GBNF_ESCAPE.sub(unescape, self.source)
        try:
            return gbnf_to_lark(text)
        except Exception as error:  # it raises bare Exceptions, IndexError, RecursionError
            raise self.error(_one_line(str(error)) or type(error).__name__) from None

    def _check_count(self, items: str, count: int, maximum: int = _MAX_RULES) -> None:
        if count > maximum:
            raise self.error(f"it has {count:,} {items}; the maximum is {maximum:,}")

    def _label(self) -> str:
        return f"the {_KIND_NAMES[self.kind]}"


def _schema_to_lark(schema: Any) -> str:
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if isinstance(options, dict) and "whitespace_flexible" not in options:
            defaults = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
            schema = schema | {"x-guidance": defaults | options}
    return f"start: %json {json.dumps(schema)}{_NO_FORCING}"


def _escape_regex(text: str) -> str:
    """Regex that matches exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _strings(value: Any) -> Iterable[str]:
    """All strings in a JSON value, names included. (json.loads has bounded its depth.)"""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _shorten(text: str, max_length: int = 60) -> str:
    return repr(text if len(text) <= max_length else text[:max_length] + "…")


def _one_line(text: str, max_length: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= max_length else text[:max_length] + "…"
