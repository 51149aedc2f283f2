"""Tools: what templates are given, what calls look like in a text, what a required call obeys."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import assets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.errors import UnspoolError
from unspool.sampling import Grammar, GrammarSpec
from unspool.text.chat import ChatTemplate
from unspool.text.json_scan import JsonScan
from unspool.text.tokenizer import Tokenizer
from unspool.text.tool_calls import (
    CallArguments,
    CallBegun,
    CallEnded,
    Piece,
    TextPiece,
    ToolCall,
    ToolCallReader,
)
from unspool.text.tool_formats import Tool, ToolFormat, tool_format

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8, "description": "note: where"}},
    "required": ["city"],
}
WEATHER = Tool("weather", "The weather of a city", CITY)
CLOCK = Tool("clock", "The time of day")


def _calls(before: str, behind: str) -> str:
    call = "{{ c.function | tojson }}"
    return f"{{{{ '{before}' }}}}{call}{{{{ '{behind}' }}}}{{% endfor %}}\n{{% endfor %}}"


# Templates that spell what the real ones of each family spell, as short as can be.
_TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TEMPLATES = {
    "hermes": _TOOLS + _TURNS + _calls("<tool_call>", "</tool_call>") + "{# arguments #}",
    "mistral": _TOOLS + _TURNS + _calls("[TOOL_CALLS][", "]"),
    "mistral-args": _TOOLS + _TURNS + "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    "granite": _TOOLS + _TURNS + _calls("<|tool_call|>[", "]"),
    "phi-tags": _TOOLS + _TURNS + _calls("<|tool_call|>", "<|/tool_call|>"),
    "phi": _TOOLS + "{{ 'functools[...]' }}" + _TURNS + _calls("", ""),
    "llama3": _TOOLS + """{{ '{"name": function name, "parameters": its arguments}' }}"""
    + _TURNS + _calls("", ""),
}  # fmt: skip
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class _Letters:
    """A tokenizer whose ids are characters, with some control tokens."""

    bos_id = eos_id = None
    add_bos = False
    chat_template = None

    def __init__(self, *controls: str) -> None:
        self.special_tokens = {text: 0x110000 + i for i, text in enumerate(controls)}

    def encode(self, text: str, *, specials: bool = False, bos: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def token_text(self, token: int) -> str:
        return chr(token)

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()


@cache
def format_of(name: str, *controls: str) -> ToolFormat:
    template = CHATML if name == "generic" else TEMPLATES[name]
    return tool_format(template, _Letters(*controls))


def read(reader: ToolCallReader, *parts: str | int) -> list[Piece]:
    """Pieces of texts and control tokens, joined where they may be."""
    pieces: list[Piece] = []
    for part in parts:
        pieces += reader.push(-1, part) if isinstance(part, str) else reader.push(part, "")
    joined: list[Piece] = []
    for piece in pieces + reader.finish():
        last = joined[-1] if joined else None
        if isinstance(piece, TextPiece | CallArguments) and type(piece) is type(last):
            joined[-1] = replace(last, text=last.text + piece.text)
        else:
            joined.append(piece)
    return joined


def told(pieces: list[Piece]) -> list[Any]:
    """Pieces in short: texts as they are, calls as (name, arguments); checks their order."""
    short: list[Any] = []
    index = 0
    while pieces:
        first, *pieces = pieces
        if isinstance(first, TextPiece):
            short.append(first.text)
            continue
        assert isinstance(first, CallBegun) and first.index == index
        arguments, ended, *pieces = pieces
        assert isinstance(arguments, CallArguments) and arguments.index == index
        assert ended == CallEnded(index)
        short.append((first.name, arguments.text))
        index += 1
    return short


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
    whole = ToolCallReader(format)
    pieces = read(whole, text)
    assert told(pieces) == ([text] if expected is None else expected)
    assert [(call.name, call.arguments) for call in whole.calls] == [
        each for each in told(pieces) if isinstance(each, tuple)
    ]
    for call in whole.calls:
        assert not call.is_complete or isinstance(json.loads(call.arguments), dict)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    edges = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    assert read(ToolCallReader(format), *parts) == pieces
    assert read(ToolCallReader(format), *text) == pieces


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
    pieces = read(ToolCallReader(format, required=required), *parts)
    assert pieces == read(ToolCallReader(format, required=required), *text)
    assert pieces == read(ToolCallReader(format, required=required), text)
    if not any(isinstance(piece, CallBegun) for piece in pieces) and not required:
        assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == text


def test_words_and_arguments_pass_at_once() -> None:
    reader = ToolCallReader(format_of("hermes"))
    assert reader.push(1, "Hello") == [TextPiece("Hello")]
    assert reader.push(1, " a < b <t") == [TextPiece(" a < b ")]  # <t may begin a mark
    assert reader.push(1, "d>") == [TextPiece("<td>")]
    assert reader.push(1, '<tool_call>{"name": "f", "arguments": ') == []
    assert reader.push(1, '{"a') == [CallBegun(0, "f"), CallArguments(0, '{"a')]
    assert reader.push(1, '": 1') == [CallArguments(0, '": 1')]
    assert reader.push(1, "}}") == [CallArguments(0, "}"), CallEnded(0)]
    assert reader.calls == [ToolCall("f", '{"a": 1}')]
    assert reader.push(1, "\n</tool_call>") == [] == reader.finish()
    cut = ToolCallReader(format_of("hermes"))
    cut.push(1, '<tool_call>{"name": "f", "arguments": {"a')
    assert cut.finish() == [CallEnded(0)] and not cut.calls[0].is_complete


def test_only_the_named_functions_count_where_they_are_given() -> None:
    format = format_of("llama3")
    text = '{"name": "Ann", "parameters": {}}'
    assert told(read(ToolCallReader(format, names={"weather"}), text)) == [text]
    assert told(read(ToolCallReader(format, names={"Ann"}), text)) == [("Ann", "{}")]


def test_marks_that_are_control_tokens_are_known_by_their_id() -> None:
    format = format_of("mistral", "[TOOL_CALLS]")
    mark = format.controls["[TOOL_CALLS]"]
    spelled = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    calls = ' [{"name": "f", "arguments": {}}]'
    assert told(read(ToolCallReader(format), spelled)) == [spelled]
    assert told(read(ToolCallReader(format), "Hm. ", mark, calls)) == ["Hm. ", ("f", "{}")]
    assert told(read(ToolCallReader(format), " ", mark, " no")) == ["  no"]
    assert told(read(ToolCallReader(format), mark, ' [{"name', mark, calls)) == [
        ' [{"name', ("f", "{}")
    ]  # fmt: skip
    newer = format_of("mistral-args", "[TOOL_CALLS]", "[ARGS]")
    mark, arguments = newer.controls["[TOOL_CALLS]"], newer.controls["[ARGS]"]
    pieces = read(ToolCallReader(newer), mark, "f", arguments, "{}", mark, "g", arguments, '{"a')
    assert told(pieces) == [("f", "{}"), ("g", '{"a')]
    tags = format_of("phi-tags", "<|tool_call|>", "<|/tool_call|>")
    mark, end = tags.controls["<|tool_call|>"], tags.controls["<|/tool_call|>"]
    call = '{"name": "f", "arguments": {}}'
    assert told(read(ToolCallReader(tags), mark, call, end, mark, call, "\n", end, "!")) == [
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
    scan = JsonScan()
    for place, character in enumerate(text, start=1):
        assert scan.take(character)
        assert scan.is_done == (place == len(text))
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from('{}[],:"\\01.-+eEtfnu x'))
    changed = text[:place] + other + text[place + 1 :]
    scan = JsonScan()
    accepted = all(scan.take(character) for character in changed) and scan.is_done
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
        reader = ToolCallReader(format_of("hermes"))
        for place in range(0, len(text), step):
            reader.push(1, text[place : place + step])
        reader.finish()
        assert time.perf_counter() - start < 5


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": ""}},
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    {"role": "user", "content": "And now?"},
]  # fmt: skip


def test_templates_without_tools_get_words() -> None:
    format = format_of("generic")
    assert (format.name, format.in_template) == ("generic", False)
    messages, tools = format.prepared(CONVERSATION, [WEATHER, CLOCK])
    assert tools is None and [m["role"] for m in messages] == [
        "system", "user", "assistant", "user"
    ]  # fmt: skip
    assert '"name": "weather"' in messages[0]["content"]
    assert messages[2] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    }
    assert messages[3]["content"] == (
        "<tool_response>\nwet\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\nAnd now?"
    )
    reader = ToolCallReader(format)
    assert len(told(read(reader, messages[2]["content"]))) == 2  # it reads what it writes
    ChatTemplate(CHATML, _Letters()).encode(messages, tools=tools)
    asked = [{"role": "system", "content": "Be brief."}, CONVERSATION[0]]
    system = format.prepared(asked, [CLOCK])[0][0]["content"]
    assert system.startswith("Be brief.\n\n") and system.endswith("answer in plain words.")
    assert format.prepared(asked, []) == (asked, None)
    no_system = CHATML.replace("{{'<", "{% if message.role == 'system' %}"
                               "{{ raise_exception('no') }}{% endif %}{{'<", 1)  # fmt: skip
    refuses = tool_format(no_system, _Letters())
    ready = refuses.prepared(CONVERSATION, [CLOCK])[0]
    assert ready[0]["role"] == "user" and ready[0]["content"].endswith("\n\nRain?")
    plain = tool_format(None, _Letters())
    assert plain.name == "generic" and plain.takes_system


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_with_tools_get_tools(name: str) -> None:
    format = format_of(name)
    assert (format.name, format.in_template, format.writes_calls) == (name, True, True)
    messages, tools = format.prepared(CONVERSATION, [WEATHER, CLOCK])
    assert tools is not None and tools[0] == {
        "type": "function",
        "function": {"name": "weather", "description": WEATHER.description, "parameters": CITY},
    }
    calls = [call for m in messages for call in m.get("tool_calls", [])]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Köln"}, {}]
    results = [m for m in messages if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in results] == [call["id"] for call in calls]
    assert [m["name"] for m in results] == ["weather", "clock"]
    assert all(m["content"] is not None for m in messages)
    assert CONVERSATION[1]["content"] is None  # the caller's own are untouched
    text = ChatTemplate(TEMPLATES[name], _Letters()).render(messages, tools=tools)
    assert "Köln" in text and "weather" in text
    assert format.prepared(CONVERSATION[:1], []) == (CONVERSATION[:1], None)
    if name == "llama3":  # which knows one call a message
        assert [m["role"] for m in messages] == ["user", *["assistant", "tool"] * 2, "user"]
    if name.startswith("mistral"):
        assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)


def test_syntaxes_that_are_not_read_here_become_words() -> None:
    for inside in ("<function=f><parameter=x>", "f\n<arg_key>x</arg_key>"):
        template = TEMPLATES["hermes"] + "{{ '<tool_call>" + inside + "' }}"
        assert tool_format(template.replace("\n", "\\n"), _Letters()).name == "generic"
    knows_no_tools = TEMPLATES["hermes"].replace(_TOOLS, "")
    assert tool_format(knows_no_tools, _Letters()).name == "generic"
    # A template that writes tools but leaves calls out: they become part of the content.
    silent = _TOOLS + "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<tool_call>' }}"
    format = tool_format(silent + "{# arguments #}", _Letters())
    assert (format.name, format.writes_calls) == ("hermes", False)
    assert format.prepared(CONVERSATION, [CLOCK])[0][1]["content"].startswith("<tool_call>\n{")


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen", "hermes"), ("mistral", "mistral"), ("deepseek", "generic")],
)
def test_real_templates(family: str, name: str) -> None:
    tokenizer = Tokenizer.from_file(assets.tokenizer_json_folder() / family)
    format = tool_format(tokenizer.chat_template, tokenizer)
    assert format.name == name
    answered = [*CONVERSATION[:4], {"role": "assistant", "content": "Wet."}, CONVERSATION[4]]
    messages, tools = format.prepared(answered, [WEATHER, CLOCK])
    prompt = ChatTemplate(tokenizer.chat_template, tokenizer).encode(messages, tools=tools)
    assert '"name": "weather"' in prompt.text and "Köln" in prompt.text and "noon" in prompt.text
    if family == "qwen":  # the template writes what its model is to write
        written = format.written([{"name": "weather", "arguments": {"city": "Köln"}}])
        assert written in prompt.text
    if family == "mistral":  # by ids: control tokens that have no text
        ids = prompt.ids[prompt.ids.index(format.controls["[TOOL_CALLS]"]) :]
        control = tokenizer.special_ids
        reader = ToolCallReader(format)
        for token in ids[: ids.index(tokenizer.eos_id)]:
            reader.push(token, "" if token in control else tokenizer.decode([token]))
        assert [call.name for call in reader.calls] == ["weather", "clock"]
        assert json.loads(reader.calls[0].arguments.replace("KÃ¶ln", "Köln"))


BAD = {
    "not JSON": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": '{"a'}}]}],
    "not a JSON object": [{"role": "assistant", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}],
    "a function with a name": [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
    "must be a list": [{"role": "assistant", "tool_calls": {"id": "1"}}],
    "which no message before it makes": [{"role": "user", "content": "x"},
                                         {"role": "tool", "tool_call_id": "9", "content": "x"}],
    "answers the call None": [{"role": "tool", "content": "x"}],
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
@pytest.mark.parametrize("name", ["generic", "hermes"])
def test_bad_calls_and_results(why: str, name: str) -> None:
    with pytest.raises(UnspoolError, match=why) as caught:
        format_of(name).prepared(BAD[why], [CLOCK])
    assert str(caught.value).startswith("message ") and "\n" not in str(caught.value)


def fits(lm: Any, grammar: str, text: str, controls: dict[str, int]) -> bool:
    """Whether a grammar takes a text in which control tokens are spelled."""
    state = Grammar.compile(GrammarSpec.lark(grammar), lm.grammar_vocabulary).start()
    for mark, token in controls.items():
        text = text.replace(mark, f"\0{token}\0")
    ids: list[int] = []
    for i, part in enumerate(text.split("\0")):
        ids += [int(part)] if i % 2 else lm.tokenizer.encode(part)
    return state.accepts(ids) == len(ids) and (state._follow(ids), state.is_complete)[1]


@pytest.mark.parametrize("name", ["generic", *TEMPLATES])
@pytest.mark.parametrize("control", [False, True])
def test_grammars_take_calls_and_nothing_else(lm: Any, name: str, control: bool) -> None:
    format = format_of(name)
    if control:  # ids that are control tokens of the model at hand
        marks = [format.begin, *([format.end] if format.end else []), "[ARGS]"]
        format = replace(format, controls={mark: 5 + i for i, mark in enumerate(marks)})
    spelled = format.controls if format.in_template else {}
    if format.named:
        one, two = "[TOOL_CALLS]clock[ARGS]{}", '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}'
        both, wrong = one + two, "[TOOL_CALLS]watch[ARGS]{}"
    else:
        call = {"name": "clock", "arguments": {}}
        other = {"name": "weather", "arguments": {"city": "Ulm"}}
        one, two, both = (format.written(each) for each in ([call], [other], [call, other]))
        wrong = format.written([{**call, "name": "watch"}])
    single = format.grammar([CLOCK, WEATHER], parallel=False)
    several = format.grammar([CLOCK, WEATHER], parallel=True)
    for text in (one, two):
        assert fits(lm, single, text, spelled) and fits(lm, several, text, spelled)
    assert fits(lm, several, both, spelled) and not fits(lm, single, both, spelled)
    for text in (wrong, "Hello", "", two.replace("Ulm", "much too long"), one + "x"):
        assert not fits(lm, several, text, spelled)
    with pytest.raises(UnspoolError, match="no tool to call"):
        format.grammar([], parallel=False)


def test_the_default_model_calls_when_it_must(lm: Any) -> None:
    format = tool_format(lm.tokenizer.chat_template, lm.tokenizer)
    assert format.name == "generic" and format.takes_system
    unit = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10},
            "unit": {"enum": ["C", "F"]}}, "required": ["city", "unit"]}  # fmt: skip
    tools = [Tool("weather", "The weather of a city", unit), CLOCK]
    messages, given = format.prepared(
        [{"role": "user", "content": "Is it raining in Paris?"}], tools
    )
    answer = lm.chat(
        messages, tools=given, grammar=format.grammar(tools, parallel=False), temperature=0
    )
    assert answer.finish_reason != "length"
    reader = ToolCallReader(format, required=True)
    pieces = [piece for step in answer.steps for piece in reader.push(step.token, step.text)]
    pieces += reader.finish()
    assert not any(isinstance(piece, TextPiece) for piece in pieces)
    (call,) = reader.calls
    arguments = json.loads(call.arguments)
    assert call.name == "clock" or arguments["unit"] in ("C", "F")
