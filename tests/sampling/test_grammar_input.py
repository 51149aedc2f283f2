"""What a user can get wrong with a grammar: one line that says so, soon, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.grammar_samples import SMALL, start, walk
from unspool.errors import SettingsError
from unspool.sampling import Grammar, GrammarSpec

BAD: list[tuple[str, Any]] = [
    ("regex", "("),
    ("regex", "[z-a]"),
    ("regex", r"(a)\1"),
    ("regex", r"(?=a)b"),
    ("regex", "a\\"),
    ("regex", r"[^\s\S]"),
    ("regex", "\x04"),
    ("regex", "\ud800"),
    ("regex", 3),
    ("regex", "a?" * 6000),
    ("choice", []),
    ("choice", "yes"),
    ("choice", [1]),
    ("choice", None),
    ("choice", ["\ud800"]),
    ("choice", [str(n) for n in range(30_000)]),
    ("json_schema", "{"),
    ("json_schema", "[1]"),
    ("json_schema", None),
    ("json_schema", {"type": "nonsense"}),
    ("json_schema", {"$ref": "#"}),
    ("json_schema", {"$ref": "#/nowhere"}),
    ("json_schema", {"$ref": "https://example.com/schema"}),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 1}),
    ("json_schema", {"type": "string", "pattern": "("}),
    ("json_schema", {"type": "string", "pattern": "a?" * 9000}),
    ("json_schema", {"enum": []}),
    ("json_schema", {"const": float("nan")}),
    ("json_schema", {"x": {1, 2}}),
    ("json_schema", {"x-guidance": 3}),
    ("json_schema", "[" * 90_000),
    ("json_schema", {"properties": {str(n): {"type": "string"} for n in range(9000)}}),
    ("json_schema", {f"d{n}": {"$ref": f"#/d{n + 1}"} for n in range(3000)} | {"$ref": "#/d0"}),
    ("lark", ""),
    ("lark", "start"),
    ("lark", "start: start"),
    ("lark", "start: nothing"),
    ("lark", 'start: "a" <|end|>'),
    ("lark", "start: " + "(" * 9000),
    ("lark", "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(2000))),
    ("gbnf", ""),
    ("gbnf", 'root ::= "'),
    ("gbnf", "root ::= nothing"),
    ("gbnf", 'root ::= "\\'),
    ("gbnf", 'root ::= "\\ud800"'),
    ("gbnf", "root ::= " + "(" * 9000),
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input_is_refused_in_one_line_and_soon(number: int) -> None:
    kind, source = BAD[number]
    with pytest.raises(SettingsError) as error:
        Grammar.compile(getattr(GrammarSpec, kind)(source), SMALL)
    words = str(error.value)
    assert "\n" not in words and 20 < len(words) < 500


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(SettingsError, match="unknown kind of grammar"):
        GrammarSpec("xml", "")  # type: ignore[arg-type]


@pytest.mark.timeout(120)
def test_what_explodes_is_bounded() -> None:
    for pattern in (r"(a|b)*a(a|b){30}c", r"((a?){50}){50}a{3000}", r"(((a{1,99}){1,99}){1,99})b"):
        try:
            walk(start(GrammarSpec.regex(pattern)), 1, longest=60)
        except SettingsError as error:
            assert "\n" not in str(error)


PARTS = [
    "start", "root", ":", "::=", '"a"', "/", "[", "]", "(", ")", "{2,", "}", "|", "*", "\\", "\n",
    "?", "A", "%json", "%ignore", "{}", "$ref", "<|tool|>", "<[5]>", "&", "~", "é", "#", "-", "^",
]  # fmt: skip


@given(
    kind=st.sampled_from(["regex", "lark", "gbnf", "json_schema"]),
    source=st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PARTS)).map("".join)),
    lead=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_no_text_gives_another_error(kind: str, source: str, lead: bool) -> None:
    if lead:
        source = {"lark": "start: ", "gbnf": "root ::= "}.get(kind, "") + source
    try:
        walk(start(getattr(GrammarSpec, kind)(source)), 0, longest=3)
    except SettingsError as error:
        assert "\n" not in str(error)
    except AssertionError as error:
        assert "no dead end" in str(error)  # possible where the vocabulary lacks a byte


WORDS = ["type", "enum", "const", "properties", "items", "anyOf", "$ref", "pattern", "minLength"]
WORDS += ["required", "minimum", "object", "array", "string", "integer", "#", "x-guidance", "not"]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(WORDS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(schema=VALUES)
@settings(max_examples=150, deadline=None)
def test_no_schema_gives_another_error(schema: Any) -> None:
    try:
        state = start(GrammarSpec.json_schema(schema))
    except SettingsError as error:
        assert "\n" not in str(error)
    else:
        assert not state.is_dead_end


def test_nothing_loads_llguidance_before_a_grammar_is_used() -> None:
    code = (
        "import sys, unspool.sampling as s; v = s.GrammarVocabulary([b'a'], []);"
        "g = s.GrammarSpec.regex('a'); print('llguidance' in sys.modules);"
        "sys.modules['llguidance'] = None\n"
        "try: s.Grammar.compile(g, v)\n"
        "except s.grammar.SettingsError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False\na grammar needs the package llguidance")
