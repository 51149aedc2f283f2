"""JSON schemas as people write them: objects are closed, and what is not enforced is reported."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from helpers.grammar_samples import SMALL, ids, start
from unspool.engine import request_builder
from unspool.errors import SettingsError, UnspoolWarning
from unspool.sampling import GrammarSpec

PET = {"type": "object", "properties": {"name": {"enum": ["ab"]}}, "required": ["name"]}
AGED = {"properties": {"age": {"type": "integer"}}}
OWNER = {"type": "object", "properties": {"pet": PET}, "required": ["pet"]}


def fits(schema: Any, value: Any) -> bool:
    """Whether the grammar of a schema accepts this value and may end after it."""
    text = value if isinstance(value, str) else json.dumps(value)
    state = start(GrammarSpec.json_schema(schema))
    tokens = ids(text)
    if state.num_accepted(tokens) < len(tokens):
        return False
    for token in tokens:
        state.advance(token)
    return state.is_complete


CLOSED: list[tuple[Any, Any, Any]] = [  # schema, what fits, what does not
    (PET, {"name": "ab"}, {"name": "ab", "x": 1}),
    (OWNER, {"pet": {"name": "ab"}}, {"pet": {"name": "ab", "x": 1}}),
    ({"type": "array", "items": PET}, [{"name": "ab"}], [{"name": "ab", "x": 1}]),
    ({"anyOf": [PET, {"type": "null"}]}, {"name": "ab"}, {"name": "ab", "x": 1}),
    ({"$ref": "#/$defs/p", "$defs": {"p": PET}}, {"name": "ab"}, {"name": "ab", "x": 1}),
    ({"allOf": [PET, AGED]}, {"name": "ab", "age": 3}, {"name": "ab", "age": 3, "x": 1}),
    ({"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": PET}}, {"name": "ab"},
     {"name": "ab", "x": 1}),
    ({"allOf": [{"$ref": "#/$defs/p"}, AGED], "$defs": {"p": PET}}, {"name": "ab", "age": 3},
     {"name": "ab", "age": 3, "x": 1}),
    ({"$ref": "#/$defs/p", "properties": AGED["properties"], "$defs": {"p": PET}},
     {"age": 3, "name": "ab"}, {"age": 3, "name": "ab", "x": 1}),
    ({"properties": AGED["properties"], "anyOf": [PET, {"properties": {"id": {"type": "integer"}},
                                                        "required": ["id"]}]},
     {"age": 3, "name": "ab"}, {"age": 3, "name": "ab", "id": 3}),
    ({"properties": {"a": {"const": 1}, "b": {"const": 2}},
      "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1}, {"a": 1, "x": 1}),
    ({"properties": {"a": {"const": 1}}, "required": ["a", "b"]}, {"a": 1, "b": 2},
     {"a": 1, "b": 2, "c": 3}),
    ({"type": "object", "properties": {}}, {}, {"x": 1}),
    ({"type": "object", "patternProperties": {"^n[0-9]$": {"type": "integer"}}}, {"n1": 1},
     {"x": 1}),
    ({**PET, "unevaluatedProperties": False}, {"name": "ab"}, {"name": "ab", "x": 1}),
    ({"properties": {"name": {"const": "ab"}}}, {"name": "ab"}, 3),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CLOSED)))
def test_an_object_has_the_properties_that_are_named(number: int) -> None:
    schema, good, bad = CLOSED[number]
    assert fits(schema, good)
    assert not fits(schema, bad)


OPEN: list[tuple[Any, Any]] = [
    ({**PET, "additionalProperties": True}, {"name": "ab", "x": 1}),
    ({**PET, "additionalProperties": {"type": "integer"}}, {"name": "ab", "x": 1}),
    ({**PET, "unevaluatedProperties": True}, {"name": "ab", "x": 1}),
    ({"x-unspool": {"open_objects": True}, **OWNER}, {"pet": {"name": "ab", "x": 1}, "y": 2}),
    ({"type": "object"}, {"x": 1}),
    ({"type": "object", "required": ["a"]}, {"a": 1, "x": 1}),
    ({"allOf": [{**PET, "additionalProperties": True}, AGED]}, {"name": "ab", "x": 1}),
    ({}, {"x": 1}),
    (True, {"x": 1}),
]


@pytest.mark.parametrize("number", range(len(OPEN)))
def test_what_says_that_it_is_open_is_open(number: int) -> None:
    assert fits(*OPEN[number])


def test_a_schema_that_holds_itself() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
    }
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    assert fits(schema, {"next": {"next": None}})
    assert not fits(schema, {"next": {"next": None, "x": 1}})
    derived = {"allOf": [{"$ref": "#/$defs/node"}, AGED], "$defs": {"node": node}}
    assert fits(derived, {"next": {"next": None}, "age": 3})


NOTED: list[tuple[Any, Any, str]] = [  # schema, a value that fits, what is said
    ({"type": "string", "not": {"const": "x"}}, "x", "'not'"),
    ({**PET, "dependentRequired": {"name": ["age"]}}, {"name": "ab"}, "'dependentRequired'"),
    ({**PET, "dependencies": {"name": ["age"]}}, {"name": "ab"}, "'dependencies'"),
    ({"type": "array", "items": {"const": 1}, "uniqueItems": True}, [1, 1], "'uniqueItems'"),
    ({"type": "array", "contains": {"const": 1}}, [2], "'contains'"),
    ({"type": "string", "format": "byte"}, "a", "format 'byte'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1, "'oneOf' is treated as 'anyOf'"),
    ({**PET, "if": PET, "then": {"properties": {"age": {"const": 3}}}},
     {"age": 3, "name": "ab"}, "'if', 'then'"),
    ({**PET, "additionalProperties": True, "propertyNames": {"pattern": "^a"}},
     {"name": "ab", "b": 1}, "'propertyNames'"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(NOTED)))
def test_what_cannot_be_kept_to_is_served_and_said(number: int) -> None:
    schema, value, words = NOTED[number]
    spec = GrammarSpec.json_schema(schema)
    assert len(spec.notes) == 1 and words in spec.notes[0]
    assert fits(schema, json.dumps(value))


QUIET: list[Any] = [
    PET,
    {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    {"oneOf": [{"const": 1}, {"const": 2}]},
    {"oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]},
    {"type": "array", "uniqueItems": False},
    {"type": "integer", "format": "int32"},
    {"type": "string", "format": "email", "title": "T", "examples": ["a"]},
]


@pytest.mark.parametrize("number", range(len(QUIET)))
def test_what_is_kept_to_is_not_spoken_of(number: int) -> None:
    assert GrammarSpec.json_schema(QUIET[number]).notes == ()


REFUSED: list[tuple[Any, str]] = [
    ({"$ref": "https://example.com/x"}, "remote schemas are not fetched"),
    ({"items": {"$ref": "#/nowhere"}}, "'#/nowhere', which does not exist"),
    ({"$ref": "#anchor"}, "'#anchor', which does not exist"),
    ({"type": "any"}, "it has the type 'any'; allowed: object"),
    ({"$dynamicRef": "#x"}, "not supported; remove it"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "no value can satisfy it"),
    ({"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
                for n in range(30)} | {"d30": PET}, "$ref": "#/$defs/d0"}, "too large after"),
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals_speak_of_the_schema(number: int) -> None:
    schema, words = REFUSED[number]
    with pytest.raises(SettingsError) as error:
        start(GrammarSpec.json_schema(schema))
    assert words in str(error.value) and "coerce" not in str(error.value)


def test_a_note_is_a_warning_in_python() -> None:
    facts: Any = type("Facts", (), {"grammar_vocabulary": lambda self: SMALL})()
    noted = {"type": "array", "items": {"const": 1}, "uniqueItems": True}
    with pytest.warns(UnspoolWarning, match="'uniqueItems' is not enforced"):
        assert request_builder._grammar(facts, {"json_schema": noted})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert request_builder._grammar(facts, {"json_schema": PET})
