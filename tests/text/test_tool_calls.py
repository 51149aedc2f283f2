"""Tool calls in a text: found as they arrive, however the text is cut."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.thought_families import HARMONY, Marked
from helpers.tool_families import CLOCK, TEMPLATES, WEATHER, Letters, format_of, read, summary
from unspool.text.reasoning import OutputStart, make_output_parser, reasoning_format
from unspool.text.tools.call_parsers import JsonScanner
from unspool.text.tools.formats import ToolSpec, tool_format
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


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=100, deadline=None)
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


# -- Calls in tags --------------------------------------------------------------------------------


TRIP = ToolSpec(
    "trip",
    parameters={
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "days": {"type": "integer"},
            "stops": {"type": "array", "items": {"type": "string"}},
            "wish": {"type": "object"},
            "cheap": {"type": "boolean"},
            "mood": {"enum": ["calm", "wild"]},
        },
        "required": ["to"],
    },
)
WANTED: dict[str, Any] = {
    "to": 'A "b" <c>\n{d}, Köln',
    "days": 3,
    "stops": ["x, y", "z]"],
    "wish": {"sea": True, "cost": 1.5, "none": None},
    "cheap": False,
}


def calls(
    name: str, *parts: str | int, tools: tuple[ToolSpec, ...] = (TRIP, WEATHER, CLOCK)
) -> Any:
    result = summary(read(ToolCallParser(format_of(name), tools=tools), *parts))
    return [item if isinstance(item, str) else (item[0], json.loads(item[1])) for item in result]


@pytest.mark.parametrize("name", ["xml", "gemma", "lfm2"])
def test_what_is_written_is_read(name: str) -> None:
    format = format_of(name)
    text = format.write_calls([{"name": "trip", "arguments": WANTED}])
    expected = [("trip", WANTED)]
    assert calls(name, f"I look.\n{text}") == ["I look.\n", *expected]
    assert calls(name, *f"I look.\n{text}") == ["I look.\n", *expected]  # letter by letter
    two = format.write_calls(
        [{"name": "clock", "arguments": {}}, {"name": "trip", "arguments": WANTED}]
    )
    assert calls(name, two) == [("clock", {}), *expected]


@pytest.mark.parametrize("name", ["xml", "gemma", "lfm2"])
def test_arguments_pass_as_they_come(name: str) -> None:
    format = format_of(name)
    text = format.write_calls([{"name": "weather", "arguments": {"city": "Reykjavik"}}])
    reader = ToolCallParser(format, tools=[WEATHER])
    place = text.index("javik")
    early = [piece for letter in text[:place] for piece in reader.push(-1, letter)]
    assert ToolCallStart(0, "weather") in early
    arguments = "".join(piece.text for piece in early if isinstance(piece, ToolCallArguments))
    assert arguments == '{"city": "Reyk'
    cut = reader.finish()
    assert cut and not reader.calls[0].is_complete


@pytest.mark.parametrize("name", ["xml", "gemma", "lfm2"])
def test_what_is_no_call_stays_text(name: str) -> None:
    begin = format_of(name).begin
    for text in (f"{begin}!", f"{begin}<func", f"a {begin[:-1]} b", "1 < 2"):
        assert "".join(calls(name, *text)) == text


def test_gemma_quotes_are_one_token() -> None:
    format = tool_format(TEMPLATES["gemma"], Letters("<|tool_call>", "<tool_call|>", '<|"|>'))
    begin, end, quote = (
        format.controls[mark] for mark in ("<|tool_call>", "<tool_call|>", '<|"|>')
    )
    reader = ToolCallParser(format, tools=[WEATHER])
    result = read(reader, begin, "call:weather{city:", quote, 'a"b', quote, "}", end)
    assert summary(result) == [("weather", '{"city": "a\\"b"}')]


def test_tags_without_a_schema_are_texts() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    assert calls("xml", text, tools=()) == [("f", {"n": "3"})]
    spoiled = text.replace("3", "three")
    number = ToolSpec("f", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})
    assert calls("xml", text, tools=(number,)) == [("f", {"n": 3})]
    assert calls("xml", spoiled, tools=(number,)) == [("f", {"n": "three"})]


def test_python_calls_as_models_write_them() -> None:
    begin, end = "<|tool_call_start|>", "<|tool_call_end|>"
    text = f"""{begin}[f(a="it's", b='x\\'y\\n', c=[1, -2.5e3], d={{"k": None}}), g()]{end} Done."""
    want = {"a": "it's", "b": "x'y\n", "c": [1, -2500.0], "d": {"k": None}}
    assert calls("lfm2", text) == [("f", want), ("g", {}), " Done."]
    # Some of its models were taught JSON between the same marks.
    listed = f'{begin}[{{"name": "f", "arguments": {{"a": 1}}}}]{end}'
    assert calls("lfm2", listed) == [("f", {"a": 1})]


def test_channels() -> None:
    tokenizer = Marked(HARMONY)
    format, tools = reasoning_format(HARMONY, tokenizer), tool_format(HARMONY, tokenizer)
    assert (tools.name, tools.writes_calls) == ("harmony", True)
    heads = (
        " to=functions.weather<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    )
    for head in heads:
        reader = make_output_parser(format, OutputStart(header="assistant"), ToolCallParser(tools))
        assert reader is not None
        text = (
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant" + head
            + '{"city": "Ulm"}<|call|>'
        )  # fmt: skip
        pieces = []
        for token in tokenizer.encode(text, specials=True):
            pieces += reader.push(token, tokenizer.display_text(token))
        pieces += reader.finish()
        assert ToolCallStart(0, "weather") in pieces
        (call,) = reader.calls
        assert (call.name, call.arguments, call.is_complete) == ("weather", '{"city": "Ulm"}', True)
