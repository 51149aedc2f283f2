"""What a text may be, as a user says it: a JSON schema, a regex, a choice, a Lark or GBNF grammar.

    GrammarSpec.json_schema({"type": "object", ...})     # or a pydantic class, or JSON text
    GrammarSpec.json()                                   # any JSON object
    GrammarSpec.regex(r"[A-Z]{3}-\\d{4}")                 # matches the whole text
    GrammarSpec.choice(["yes", "no"])
    GrammarSpec.lark('start: "a" | "b" start')           # llguidance's dialect
    GrammarSpec.gbnf('root ::= "a" | "b" root')          # llama.cpp's

Each becomes one Lark grammar, which `grammar.py` compiles. What is too large is refused here: the
compiler's own limits bound its steps, but its time to read a grammar grows with the square of the
length, and a long chain of rules overflows its stack.
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

_NAMES: dict[Kind, str] = {
    "json": "JSON",
    "json_schema": "JSON schema",
    "regex": "regex",
    "choice": "choice",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
}
_LONGEST: dict[Kind, int] = {
    "json": 0,
    "json_schema": 100_000,
    "regex": 10_000,
    "choice": 1_000_000,
    "lark": 32_000,
    "gbnf": 32_000,
}
_MOST_CHOICES = 20_000
_MOST_RULES = 1_000  # of rules or $ref targets: each may be one level of the compiler's recursion
_LONGEST_IN_SCHEMA = 10_000  # a pattern is a regex, wherever it stands

_WHITESPACE = r"\x20|\n\x20{0,40}"
"""Between the parts of JSON: nothing, a space, or a new line with its indent. The usual "any
whitespace" lets a model that has lost its thread write blanks for ever."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""The mask shall depend on the text alone. Otherwise, where only one text can follow, llguidance
allows only one of its spellings in tokens, and what may be chosen would differ from the mask."""

_RULE = re.compile(r"\b\w+\s*(?:\[[^\]\n]*\]|\{[^}\n]*\})?\s*:(?!:)|::=")
_REF = re.compile(r'"\$ref"\s*:\s*("(?:[^"\\]|\\.)*")')
# The compiler's words for a schema's faults, and what they mean to its author.
_SCHEMA_WORDS = {
    r"^Unimplemented keys: \[(.*)\]$": r"it uses \1, which is not known here; leave that out",
    r"^Unsatisfiable schema: ": "nothing can fit it: ",
    r"^Invalid type: (.*)$": r"it has the type '\1'; there are object, array, string, number,"
    " integer, boolean and null",
    r"^Anchor '(.*)' does not exist$": r"it refers to '#\1', which is not in it",
    r"^look-around, .* is not supported$": "a pattern in it looks ahead or behind, which a grammar"
    " cannot; write what the whole text is",
}
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.S)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on a text: its kind and its source. Equal ones are compiled once."""

    kind: Kind
    source: str = ""
    notes: tuple[str, ...] = field(default=(), compare=False)  # where more fits than was asked for

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise SettingsError(
                f"unknown kind of grammar {self.kind!r}; it may be {', '.join(get_args(Kind))}"
            )
        if not isinstance(self.source, str):
            raise SettingsError(f"{self._a()} must be text, not {type(self.source).__name__}")
        longest = _LONGEST[self.kind] or len(self.source)
        if len(self.source) > longest:
            raise SettingsError(
                f"{self._a()} of {len(self.source):,} characters is too long;"
                f" {longest:,} are allowed"
            )
        try:
            self.source.encode("utf-8")
        except UnicodeEncodeError:
            raise SettingsError(f"{self._a()} holds half a character (a lone surrogate)") from None

    @classmethod
    def json(cls) -> GrammarSpec:
        """Any JSON object."""
        return cls("json")

    @classmethod
    def json_schema(cls, schema: Any) -> GrammarSpec:
        """JSON that a schema describes: a dict, JSON text, or a class with `model_json_schema`.

        Objects have the properties that the schema names and no others (see `json_schema.py`).
        """
        describe = getattr(schema, "model_json_schema", None)
        if callable(describe):  # pydantic's way; unspool itself does not need pydantic
            schema = describe()
        try:
            if isinstance(schema, str | bytes):
                schema = json.loads(schema)
            given = cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"the JSON schema is not JSON: {_one_line(str(error))}") from None
        if not isinstance(schema, dict | bool):
            kind = type(schema).__name__
            raise SettingsError(f"the JSON schema is a {kind}; it must be an object, or true")
        try:
            ready, notes = prepare_schema(json.loads(given.source))
        except SchemaError as error:
            raise given.refuse(f"it {error}") from None
        except RecursionError:
            raise given.refuse("it is nested too deep") from None
        return cls("json_schema", json.dumps(ready), tuple(notes))

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that a regular expression matches from its beginning to its end.

        Without look-around and references back. `\\d` is 0 to 9: nobody wants Khmer digits.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> GrammarSpec:
        """One of the given texts."""
        several = isinstance(choices, Iterable) and not isinstance(choices, str | bytes)
        listed = list(choices) if several else None
        if listed is None or not all(isinstance(choice, str) for choice in listed):
            raise SettingsError("the choice must be a list of texts")
        return cls("choice", json.dumps(listed, ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> GrammarSpec:
        """A grammar in llguidance's dialect of Lark; it begins at the rule `start`."""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> GrammarSpec:
        """A grammar in llama.cpp's GBNF; it begins at the rule `root`."""
        return cls("gbnf", text)

    def refuse(self, why: str) -> SettingsError:
        """The error to raise when this cannot be compiled, in one line."""
        if self.kind in ("json", "json_schema", "choice"):
            return SettingsError(f"{self._a()} cannot be used: {why}")
        return SettingsError(f"{self._a()} {_short(self.source)} cannot be used: {why}")

    def refuse_as(self, message: str) -> SettingsError:
        """`refuse` with the gist of the compiler's message, which draws over many lines."""
        lines = message.strip().splitlines() or ["no reason given"]
        named = re.search(r"^error: (.+)$", message, re.MULTILINE)  # the regex parser's verdict
        gist = named[1] if named else lines[0]
        gist = re.sub(r"^panic: ", "it is too large, or of a form not supported: ", gist)
        if self.kind not in ("lark", "gbnf"):  # lines of a grammar that the user has not seen
            gist = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", gist)
        if self.kind == "json_schema":
            for theirs, ours in _SCHEMA_WORDS.items():
                gist = re.sub(theirs, ours, gist)
        return self.refuse(_one_line(gist))

    def to_lark(self) -> str:
        """This as a Lark grammar; SettingsError where that cannot be."""
        if self.kind == "json":
            return _schema_to_lark({"type": "object"})
        if self.kind == "json_schema":
            return self._schema()
        if self.kind == "regex":
            from llguidance import regex_to_lark

            if re.search(r"(?<!\\)(\\\\)*\\\Z", self.source):
                raise self.refuse("it ends in a lone backslash")  # which would take in the /
            pattern = regex_to_lark(self.source, use_ascii="d")
            return f"start: /{pattern or '(?:)'}/{_NO_FORCING}"  # // would begin a comment
        if self.kind == "choice":
            return self._choice()
        self._bound("rules", len(_RULE.findall(self.source)))
        text = self._gbnf() if self.kind == "gbnf" else self.source
        self._bound("different $refs", len(set(_REF.findall(text))))
        return text + _NO_FORCING

    def _schema(self) -> str:
        try:
            schema = json.loads(self.source)
        except (ValueError, RecursionError) as error:
            raise self.refuse(_one_line(str(error))) from None
        self._bound("different $refs", len(set(_REF.findall(json.dumps(schema)))))
        if any(len(text) > _LONGEST_IN_SCHEMA for text in _texts(schema)):
            raise self.refuse(f"it holds a text of more than {_LONGEST_IN_SCHEMA:,} characters")
        return _schema_to_lark(schema)

    def _choice(self) -> str:
        try:
            choices = json.loads(self.source)
        except (ValueError, RecursionError):
            choices = None
        if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
            raise self.refuse("it must be a list of texts")
        if not choices:
            raise self.refuse("it is empty; give at least one text")
        self._bound("texts", len(choices), _MOST_CHOICES)
        lines = "|".join(_literally(text) for text in dict.fromkeys(choices))
        return f"start: /(?:{lines})/{_NO_FORCING}"

    def _gbnf(self) -> str:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        def plainly(found: re.Match[str]) -> str:
            """An escaped character as itself: the converter garbles some escapes."""
            digits = found[1] or found[2] or found[3]
            if digits is None:
                return found[0]
            code = int(digits, 16)
            if code < 0x80:
                return f"\\x{code:02x}"
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self.refuse(f"{found[0]} is no character")
            return chr(code)

        text = _GBNF_ESCAPE.sub(plainly, self.source)
        try:
            return gbnf_to_lark(text)
        except Exception as error:  # it raises bare Exceptions, IndexError, RecursionError
            raise self.refuse(_one_line(str(error)) or type(error).__name__) from None

    def _bound(self, what: str, count: int, most: int = _MOST_RULES) -> None:
        if count > most:
            raise self.refuse(f"it has {count:,} {what}; {most:,} are allowed")

    def _a(self) -> str:
        return f"the {_NAMES[self.kind]}"


def _schema_to_lark(schema: Any) -> str:
    if isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        if isinstance(own, dict) and "whitespace_flexible" not in own:
            usual = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
            schema = schema | {"x-guidance": usual | own}
    return f"start: %json {json.dumps(schema)}{_NO_FORCING}"


def _literally(text: str) -> str:
    """A regex that matches this text only."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _texts(value: Any) -> Iterable[str]:
    """Every text in a JSON value, names included. (json.loads has bounded its depth.)"""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _short(text: str, longest: int = 60) -> str:
    return repr(text if len(text) <= longest else text[:longest] + "…")


def _one_line(text: str, longest: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[:longest] + "…"
