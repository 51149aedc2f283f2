"""What a text obeys that must be a call, in the syntaxes that are no JSON: Lark grammars.

Each function gives the rules of one call's arguments; `formats.py` puts the marks around them. A
schema is followed as far as its types, choices, lists and objects go; what lies beyond (patterns,
bounds) is left to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NUMBERS = r"""
INTEGER: /-?(0|[1-9][0-9]{0,18})/
NUMBER: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/
"""


class Literals:
    """Values as a language writes them, by their schema."""

    def __init__(
        self, *, quote: str, text: str, words: tuple[str, str, str], comma: str, colon: str
    ) -> None:
        self._quote = quote  # as the grammar spells it
        self._text = text  # any string, with MOST for how many characters
        self._true, self._false, self._null = words
        self._comma, self._colon = comma, colon

    def value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return "any_value"
        if "const" in schema:
            return self._constant(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return f"({' | '.join(self._constant(each) for each in schema['enum'])})"
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return f"({' | '.join(self.value(each) for each in schema[name])})"
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return f"({' | '.join(self.value({**schema, 'type': kind}) for kind in kinds)})"
        return self._of_type(kinds, schema)

    def _of_type(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind == "array":
            item = self.value(schema.get("items"))
            return f'"[" ({item} ({_spelled(self._comma)} {item})*)? "]"'
        if kind == "object" and isinstance(schema.get("properties"), Mapping):
            return f'"{{" {self.fields(schema, self._colon)} "}}"'
        known = {"string": self._string(schema), "integer": "INTEGER", "number": "NUMBER",
                 "boolean": f"({_spelled(self._true)} | {_spelled(self._false)})",
                 "null": _spelled(self._null)}  # fmt: skip
        return known.get(kind, "any_value") if isinstance(kind, str) else "any_value"

    def _string(self, schema: Mapping[str, Any]) -> str:
        longest = schema.get("maxLength")
        most = f"0,{longest}" if isinstance(longest, int) and longest >= 0 else "0,"
        return self._text.replace("MOST", most)

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"({self._quote} {_spelled(value)} {self._quote})"
        words = {True: self._true, False: self._false, None: self._null}
        is_word = value is None or isinstance(value, bool)
        return _spelled(words[value] if is_word else json.dumps(value))

    def fields(self, schema: Mapping[str, Any], colon: str) -> str:
        """Properties in their order; those that are not required may be left out."""
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        named = [
            (f"{_spelled(f'{name}{colon}')} {self.value(inner)}", name in required)
            for name, inner in properties.items()
        ]
        behind = ""  # the fields behind this one, where some stand before them
        alone = ""  # ... and where none does
        for field, is_required in reversed(named):
            first = f"{field} {behind}".strip()
            optional = f"({first} | {alone})" if alone else f"({first})?"
            alone = first if is_required else optional
            more = f"{_spelled(self._comma)} {field}"
            behind = f"{more if is_required else f'({more})?'} {behind}".strip()
        return alone

    def rules(self) -> str:
        """The rules that the values refer to."""
        comma, colon = _spelled(self._comma), _spelled(self._colon)
        words = " | ".join(map(_spelled, (self._true, self._false, self._null)))
        return f"""any_value: {self._string({})} | NUMBER | {words} | any_list | any_object
any_list: "[" (any_value ({comma} any_value)*)? "]"
any_object: "{{" (any_field ({comma} any_field)*)? "}}"
any_field: KEY {colon} any_value
KEY: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/
{NUMBERS}"""


def python_literals() -> Literals:
    return Literals(
        quote='"\'"',
        text=r"""/'([^'\\\n]|\\.){MOST}'/""",
        words=("True", "False", "None"),
        comma=", ",
        colon=": ",
    )


def gemma_literals(quote: str) -> Literals:
    return Literals(
        quote=quote,
        text=f"({quote} (/[^<]{{MOST}}/)? {quote})",
        words=("true", "false", "null"),
        comma=",",
        colon=":",
    )


def tagged_parameters(schema: Mapping[str, Any], rules: dict[str, str]) -> str:
    """The parameters of a call in tags; adds the rules that they refer to.

    A text may be anything up to the tag that ends it.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    parts: list[str] = []
    for name, inner in properties.items():
        begin, end = _spelled(f"<parameter={name}>\n"), "\n</parameter>\n"
        if isinstance(inner, Mapping) and _are_texts(inner.get("enum")):
            choices = " | ".join(_spelled(f"{each}{end}") for each in inner["enum"])
            one = f"{begin} ({choices})"
        elif isinstance(inner, Mapping) and inner.get("type") == "string":
            most = inner.get("maxLength") if isinstance(inner.get("maxLength"), int) else ""
            text = f"text_{most}" if most != "" else "text"
            rules[text] = f"{text}[suffix={_spelled(end)}]: /(?s:.{{0,{most}}})/"
            one = f"{begin} {text}"
        else:
            one = f"{begin} %json {json.dumps(inner)} {_spelled(end)}"
        parts.append(one if name in required else f"({one})?")
    return " ".join(parts)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
