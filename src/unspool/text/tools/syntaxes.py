"""Calls in the syntaxes that are no JSON: written out, and as rules that a required call obeys.

tags     <function=f>                 gemma  call:f{x:<|"|>a<|"|>}     python  f(x='a')
         <parameter=x>
         a
         </parameter>
         </function>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from unspool.text.tools.call_literals import QUOTE
from unspool.text.tools.grammars import Literals, gemma_literals, python_literals, tagged_parameters


def written_call(syntax: str, name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model would write it, without the marks around it."""
    if syntax == "tags":
        values = {key: _shown(value) for key, value in arguments.items()}
        inside = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items()]
        return f"<function={name}>\n{''.join(inside)}</function>"
    if syntax == "gemma":
        fields = [f"{key}:{_gemma(arguments[key])}" for key in sorted(arguments)]
        return f"call:{name}{{{','.join(fields)}}}"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_gemma(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    return json.dumps(value)


def call_rules(
    syntax: str, tools: Sequence[tuple[str, Mapping[str, Any]]], quote: str
) -> list[str]:
    """A rule `call_0`, `call_1`, ... for each function and its schema, and those they refer to.

    `quote` is Gemma's, as the grammar spells it.
    """
    found: dict[str, str] = {}
    calls: list[str] = []
    literals: Literals | None = None
    if syntax != "tags":
        literals = gemma_literals(quote) if syntax == "gemma" else python_literals()
        found["literals"] = literals.rules()
    for number, (name, schema) in enumerate(tools):
        if literals is None:
            begin, end = f"<function={name}>\n", "</function>"
            inside = tagged_parameters(schema, found)
        elif syntax == "gemma":
            begin, end = f"call:{name}{{", "}"
            ordered = dict(sorted((schema.get("properties") or {}).items()))
            inside = literals.fields({**schema, "properties": ordered}, ":")
        else:
            begin, end = f"{name}(", ")"
            inside = literals.fields(schema, "=")
        calls.append(f"call_{number}: {json.dumps(begin)} {inside} {json.dumps(end)}")
    return [*calls, *found.values()]
