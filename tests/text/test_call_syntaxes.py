"""Calls in tags, in Gemma's and in Python's way, and in channels: read as they arrive, as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.thought_families import HARMONY, Marked
from helpers.tool_families import CLOCK, TEMPLATES, WEATHER, Letters, format_of, read, summary
from unspool.text.reasoning import OutputStart, make_output_parser, reasoning_format
from unspool.text.tools.formats import ToolSpec, tool_format
from unspool.text.tools.parser import ToolCallArguments, ToolCallParser, ToolCallStart

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
