"""Tool calls in a text: found as they arrive, however the text is cut."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tool_families import TEMPLATES, format_of, read, summary
from unspool.text.tools.call_parsers import JsonScanner
from unspool.text.tools.parser import (
    ParsedToolCall,
    TextPiece,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallParser,
    ToolCallStart,
)

H = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
F = ("f", '{"a": [1, "}"]}')
CASES: list[tuple[str, str, list[Any]]] = [
    ("hermes", H, [F]),
    ("hermes", f"Let me see.\n{H}\n{H}\n", ["Let me see.\n", F, F]),
    ("hermes", f" \n{H} Done. ", [F, " Done. "]),
    ("hermes", '<tool_call>{"arguments": {"b": 1}, "name": "g"}</tool_call>', [("g", '{"b": 1}')]),
    ("hermes", '<tool_call>{"name": "g", "parameters": {}, "id": "x"}', [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', [("g", "{}")]),
    ("hermes", '<tool_call>[{"name": "g", "arguments": {}}, {"name": "h", "arguments": {}}]'
     "</tool_call>", [("g", "{}"), ("h", "{}")]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}}</tool_call>!', [("g", "{}"), "!"]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}</tool_call>!', [("g", "{}"), "!"]),
    ("hermes", '<tool_call>{"name": "g\\u00e9", "arguments": {"a": "x\ny"}}</tool_call>',
     [("gé", '{"a": "x\\u000ay"}')]),
    # Cut short, or broken, inside the arguments.
    ("hermes", '<tool_call>{"name": "g", "arguments": {"a": "b', [("g", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"a": oh no', [("g", '{"a": '), "oh no"]),
    # No calls.
    ("hermes", 'It is {"name": "f", "arguments": {}}, isn\'t it?', None),
    ("hermes", "Put it in <tool_call> tags, or <tool_calls>, or <tool", None),
    ("hermes", '<tool_call>{"name": "g", "arguments": ', None),
    ("hermes", '<tool_call>{"name": "g", "arguments": "x"}</tool_call>', None),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', None),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', None),
    ("hermes", "<tool_call>[]</tool_call>", None),
    ("hermes", " \n ", None),
    ("hermes", f"<tool_call><tool_call>\n{H}", ["<tool_call><tool_call>\n", F]),
    ("generic", f"Well: {H}", ["Well: ", F]),
    ("llama3", '{"name": "f", "parameters": {"a": {}}}', [("f", '{"a": {}}')]),
    ("llama3", ' {"type": "function", "name": "f", "arguments": {}}', [("f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}\n',
     [("f", "{}"), ("g", "{}")]),
    ("llama3", '{"name": "f", "parameters": {}} That is all; {yes}',
     [("f", "{}"), " That is all; {yes}"]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
    ("llama3", 'As JSON: {"name": "f", "parameters": {}}', None),
    ("llama3", '{"name": "Ann", "age": 7, "parameters": {}}', None),
    ("llama3", '{"name": "Ann"} {', None),
    ("llama3", '<|python_tag|>print("x")', None),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"} , '
     '{"name": "g", "arguments": {"x": [1]}}]', [("f", "{}"), ("g", '{"x": [1]}')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, oh', [("f", "{}"), ", oh"]),
    ("mistral", "[TOOL_CALLS] is a mark, and [TOOL", None),
    ("mistral-args", 'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
     ["Hm.", ("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral-args", '[TOOL_CALLS]f{"a": 1} ', [("f", '{"a": 1}')]),
    ("mistral-args", "[TOOL_CALLS]f[ARG]{}", None),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]', [("f", "{}")]),
    ("phi-tags", '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|><|tool_call|>'
     '{"name": "g", "arguments": {}}<|/tool_call|>', [("f", "{}"), ("g", "{}")]),
    ("phi", 'functools[{"name": "f", "arguments": {}}]', [("f", "{}")]),
    ("phi", "Import functools, functools[0].", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_calls_in_a_text_however_it_is_cut(
    name: str, text: str, expected: list[Any] | None, data: st.DataObject
) -> None:
    format = format_of(name)
    reader = ToolCallParser(format)
    pieces = read(reader, text)
    assert summary(pieces) == ([text] if expected is None else expected)
    assert [(call.name, call.arguments) for call in reader.calls] == [
        item for item in summary(pieces) if isinstance(item, tuple)
    ]
    for call in reader.calls:
        assert not call.is_complete or isinstance(json.loads(call.arguments), dict)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    edges = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    assert read(ToolCallParser(format), *parts) == pieces
    assert read(ToolCallParser(format), *text) == pieces


SNIPPETS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "functools", "f", "}", "]",
            '{"name": "f", ', '"arguments": {', '"parameters": ', "{", "[", ", ", " ", ";", '"',
            "<|tool_call|>", '{"a": "<tool_call>"}', "<", "\\", "null",
            '{"name": "f", "arguments": {}}', H]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["generic", *TEMPLATES]), st.lists(st.sampled_from(SNIPPETS), max_size=12),
       st.booleans())  # fmt: skip
def test_any_text_is_read_the_same_in_any_cut(name: str, parts: list[str], required: bool) -> None:
    format = format_of(name)
    text = "".join(parts)
    pieces = read(ToolCallParser(format, required=required), *parts)
    assert pieces == read(ToolCallParser(format, required=required), *text)
    assert pieces == read(ToolCallParser(format, required=required), text)
    if not any(isinstance(piece, ToolCallStart) for piece in pieces) and not required:
        assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == text


def test_words_and_arguments_pass_at_once() -> None:
    reader = ToolCallParser(format_of("hermes"))
    assert reader.push(1, "Hello") == [TextPiece("Hello")]
    assert reader.push(1, " a < b <t") == [TextPiece(" a < b ")]  # <t may begin a mark
    assert reader.push(1, "d>") == [TextPiece("<td>")]
    assert reader.push(1, '<tool_call>{"name": "f", "arguments": ') == []
    assert reader.push(1, '{"a') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a')]
    assert reader.push(1, '": 1') == [ToolCallArguments(0, '": 1')]
    assert reader.push(1, "}}") == [ToolCallArguments(0, "}"), ToolCallEnd(0)]
    assert reader.calls == [ParsedToolCall("f", '{"a": 1}')]
    assert reader.push(1, "\n</tool_call>") == [] == reader.finish()
    cut = ToolCallParser(format_of("hermes"))
    cut.push(1, '<tool_call>{"name": "f", "arguments": {"a')
    assert cut.finish() == [ToolCallEnd(0)] and not cut.calls[0].is_complete


def test_only_the_named_functions_count_where_they_are_given() -> None:
    format = format_of("llama3")
    text = '{"name": "Ann", "parameters": {}}'
    assert summary(read(ToolCallParser(format, names={"weather"}), text)) == [text]
    assert summary(read(ToolCallParser(format, names={"Ann"}), text)) == [("Ann", "{}")]


def test_marks_that_are_control_tokens_are_known_by_their_id() -> None:
    format = format_of("mistral", "[TOOL_CALLS]")
    mark = format.controls["[TOOL_CALLS]"]
    spelled = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    calls = ' [{"name": "f", "arguments": {}}]'
    assert summary(read(ToolCallParser(format), spelled)) == [spelled]
    assert summary(read(ToolCallParser(format), "Hm. ", mark, calls)) == ["Hm. ", ("f", "{}")]
    assert summary(read(ToolCallParser(format), " ", mark, " no")) == ["  no"]
    assert summary(read(ToolCallParser(format), mark, ' [{"name', mark, calls)) == [
        ' [{"name', ("f", "{}")
    ]  # fmt: skip
    newer = format_of("mistral-args", "[TOOL_CALLS]", "[ARGS]")
    mark, arguments = newer.controls["[TOOL_CALLS]"], newer.controls["[ARGS]"]
    pieces = read(ToolCallParser(newer), mark, "f", arguments, "{}", mark, "g", arguments, '{"a')
    assert summary(pieces) == [("f", "{}"), ("g", '{"a')]
    tags = format_of("phi-tags", "<|tool_call|>", "<|/tool_call|>")
    mark, end = tags.controls["<|tool_call|>"], tags.controls["<|/tool_call|>"]
    call = '{"name": "f", "arguments": {}}'
    assert summary(read(ToolCallParser(tags), mark, call, end, mark, call, "\n", end, "!")) == [
        ("f", "{}"), ("f", "{}"), "!"
    ]  # fmt: skip


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(JSON, st.sampled_from([None, 1]), st.booleans(), st.data())
def test_the_scanner_knows_json(value: Any, indent: int | None, ascii: bool, data: Any) -> None:
    text = json.dumps({"value": value}, indent=indent, ensure_ascii=ascii)
    scan = JsonScanner()
    for place, character in enumerate(text, start=1):
        assert scan.push(character)
        assert scan.is_done == (place == len(text))
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from('{}[],:"\\01.-+eEtfnu x'))
    changed = text[:place] + other + text[place + 1 :]
    scan = JsonScanner()
    accepted = all(scan.push(character) for character in changed) and scan.is_done
    try:
        json.loads(changed)
        is_json = True
    except ValueError:
        is_json = False
    assert accepted == is_json


@pytest.mark.parametrize(
    "text",
    ["<tool_call>x" * 4_000, '<tool_call>{"name": "' * 2_500, "<" * 40_000, " " * 40_000,
     '<tool_call>{"a": ' * 2_500, '<tool_call>{"name": "f", "arguments": ' + '{"a": [' * 5_000,
     '<tool_call>{"a":' + "[" * 40_000, '<tool_call>{"name": "f"}</tool_call>\n' * 1_000],
    ids=range(8),
)  # fmt: skip
def test_a_long_text_takes_linear_time(text: str) -> None:
    for step in (3, len(text)):
        start = time.perf_counter()
        reader = ToolCallParser(format_of("hermes"))
        for place in range(0, len(text), step):
            reader.push(1, text[place : place + step])
        reader.finish()
        assert time.perf_counter() - start < 30
