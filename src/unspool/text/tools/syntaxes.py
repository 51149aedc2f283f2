"""Tool calls in other syntaxes than JSON: writing them, and grammar rules for required calls.

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
from unspool.text.tools.grammars import (
    LiteralGrammar,
    gemma_literals,
    python_literals,
    tagged_parameters,
)


def write_call(syntax: str, name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the model would write it, without marks."""
    if syntax == "tags":
        values = {key: _parameter_text(value) for key, value in arguments.items()}
        inside = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items()]
        return f"<function={name}>\n{''.join(inside)}</function>"
    if syntax == "gemma":
        fields = [f"{key}:{_gemma_literal(arguments[key])}" for key in sorted(arguments)]
        return f"call:{name}{{{','.join(fields)}}}"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _parameter_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _gemma_literal(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_gemma_literal(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_literal, value))}]"
    return json.dumps(value)


def call_rules(
    syntax: str, tools: Sequence[tuple[str, Mapping[str, Any]]], quote: str
) -> list[str]:
    """Return rules `call_0`, `call_1`, ... for the functions, and the rules they refer to.

    `quote` is Gemma's quote as a grammar literal.
    """
    rules: dict[str, str] = {}
    calls: list[str] = []
    literals: LiteralGrammar | None = None
    if syntax != "tags":
        literals = gemma_literals(quote) if syntax == "gemma" else python_literals()
        rules["literals"] = literals.rules()
    for number, (name, schema) in enumerate(tools):
        if literals is None:
            begin, end = f"<function={name}>\n", "</function>"
            parameters = tagged_parameters(schema, rules)
        elif syntax == "gemma":
            begin, end = f"call:{name}{{", "}"
            ordered = dict(sorted((schema.get("properties") or {}).items()))
            parameters = literals.fields({**schema, "properties": ordered}, ":")
        else:
            begin, end = f"{name}(", ")"
            parameters = literals.fields(schema, "=")
        calls.append(f"call_{number}: {json.dumps(begin)} {parameters} {json.dumps(end)}")
    return [*calls, *rules.values()]
