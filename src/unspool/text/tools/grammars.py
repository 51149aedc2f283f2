"""Lark grammars for the arguments of tool calls in other syntaxes than JSON.

`formats.py` adds the marks. Types, enums, arrays and objects of a schema are enforced; patterns and
bounds are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NUMBERS = r"""
INTEGER: /-?(0|[1-9][0-9]{0,18})/
NUMBER: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/
"""


class LiteralGrammar:
    """Grammar of the values of one syntax, by their schema."""

    def __init__(
        self, *, quote: str, text: str, words: tuple[str, str, str], comma: str, colon: str
    ) -> None:
        self._quote = quote  # as written in the grammar
        self._text = text  # any string; MOST is replaced by the length bounds
        self._true, self._false, self._null = words
        self._comma, self._colon = comma, colon

    def value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return "any_value"
        if "const" in schema:
            return self._constant(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return f"({' | '.join(self._constant(choice) for choice in schema['enum'])})"
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return f"({' | '.join(self.value(choice) for choice in schema[name])})"
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return f"({' | '.join(self.value({**schema, 'type': kind}) for kind in kinds)})"
        return self._of_type(kinds, schema)

    def _of_type(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind == "array":
            item = self.value(schema.get("items"))
            return f'"[" ({item} ({_literal(self._comma)} {item})*)? "]"'
        if kind == "object" and isinstance(schema.get("properties"), Mapping):
            return f'"{{" {self.fields(schema, self._colon)} "}}"'
        rules = {"string": self._string(schema), "integer": "INTEGER", "number": "NUMBER",
                 "boolean": f"({_literal(self._true)} | {_literal(self._false)})",
                 "null": _literal(self._null)}  # fmt: skip
        return rules.get(kind, "any_value") if isinstance(kind, str) else "any_value"

    def _string(self, schema: Mapping[str, Any]) -> str:
        longest = schema.get("maxLength")
        most = f"0,{longest}" if isinstance(longest, int) and longest >= 0 else "0,"
        return self._text.replace("MOST", most)

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"({self._quote} {_literal(value)} {self._quote})"
        words = {True: self._true, False: self._false, None: self._null}
        is_word = value is None or isinstance(value, bool)
        return _literal(words[value] if is_word else json.dumps(value))

    def fields(self, schema: Mapping[str, Any], colon: str) -> str:
        """Return the rule of an object's properties, in order; optional ones may be missing."""
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        rules = [
            (f"{_literal(f'{name}{colon}')} {self.value(inner)}", name in required)
            for name, inner in properties.items()
        ]
        following = ""  # the fields after this one, if others precede them
        leading = ""  # ... and if none does
        for field, is_required in reversed(rules):
            first = f"{field} {following}".strip()
            optional = f"({first} | {leading})" if leading else f"({first})?"
            leading = first if is_required else optional
            later = f"{_literal(self._comma)} {field}"
            following = f"{later if is_required else f'({later})?'} {following}".strip()
        return leading

    def rules(self) -> str:
        """Return the rules that the values refer to."""
        comma, colon = _literal(self._comma), _literal(self._colon)
        words = " | ".join(map(_literal, (self._true, self._false, self._null)))
        return f"""any_value: {self._string({})} | NUMBER | {words} | any_list | any_object
any_list: "[" (any_value ({comma} any_value)*)? "]"
any_object: "{{" (any_field ({comma} any_field)*)? "}}"
any_field: KEY {colon} any_value
KEY: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/
{NUMBERS}"""


def python_literals() -> LiteralGrammar:
    return LiteralGrammar(
        quote='"\'"',
        text=r"""/'([^'\\\n]|\\.){MOST}'/""",
        words=("True", "False", "None"),
        comma=", ",
        colon=": ",
    )


def gemma_literals(quote: str) -> LiteralGrammar:
    return LiteralGrammar(
        quote=quote,
        text=f"({quote} (/[^<]{{MOST}}/)? {quote})",
        words=("true", "false", "null"),
        comma=",",
        colon=":",
    )


def tagged_parameters(schema: Mapping[str, Any], rules: dict[str, str]) -> str:
    """Return the rule of a call's parameters as tags; adds the rules that it refers to.

    A string may contain anything except its end tag.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    parts: list[str] = []
    for name, inner in properties.items():
        begin, end = _literal(f"<parameter={name}>\n"), "\n</parameter>\n"
        if isinstance(inner, Mapping) and _are_texts(inner.get("enum")):
            choices = " | ".join(_literal(f"{choice}{end}") for choice in inner["enum"])
            rule = f"{begin} ({choices})"
        elif isinstance(inner, Mapping) and inner.get("type") == "string":
            most = inner.get("maxLength") if isinstance(inner.get("maxLength"), int) else ""
            text = f"text_{most}" if most != "" else "text"
            rules[text] = f"{text}[suffix={_literal(end)}]: /(?s:.{{0,{most}}})/"
            rule = f"{begin} {text}"
        else:
            rule = f"{begin} %json {json.dumps(inner)} {_literal(end)}"
        parts.append(rule if name in required else f"({rule})?")
    return " ".join(parts)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
