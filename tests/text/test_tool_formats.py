"""Tools as families of models know them: what templates are given, what a required call obeys."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from helpers import assets
from helpers.tool_families import (
    CHATML,
    CITY,
    CLOCK,
    TEMPLATES,
    TOOLS,
    WEATHER,
    Letters,
    format_of,
    read,
    summary,
)
from unspool.errors import UnspoolError
from unspool.sampling import Grammar, GrammarSpec
from unspool.text.chat.template import ChatTemplate
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.text.tools.formats import ToolSpec, tool_format
from unspool.text.tools.parser import TextPiece, ToolCallParser

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
    messages, tools = format.prepare_messages(CONVERSATION, [WEATHER, CLOCK])
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
    reader = ToolCallParser(format)
    assert len(summary(read(reader, messages[2]["content"]))) == 2  # it reads what it writes
    ChatTemplate(CHATML, Letters()).encode(messages, tools=tools)
    conversation = [{"role": "system", "content": "Be brief."}, CONVERSATION[0]]
    system = format.prepare_messages(conversation, [CLOCK])[0][0]["content"]
    assert system.startswith("Be brief.\n\n") and system.endswith("answer in plain words.")
    assert format.prepare_messages(conversation, []) == (conversation, None)
    no_system = CHATML.replace("{{'<", "{% if message.role == 'system' %}"
                               "{{ raise_exception('no') }}{% endif %}{{'<", 1)  # fmt: skip
    refuses = tool_format(no_system, Letters())
    ready = refuses.prepare_messages(CONVERSATION, [CLOCK])[0]
    assert ready[0]["role"] == "user" and ready[0]["content"].endswith("\n\nRain?")
    plain = tool_format(None, Letters())
    assert plain.name == "generic" and plain.takes_system


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_with_tools_get_tools(name: str) -> None:
    format = format_of(name)
    assert (format.name, format.in_template, format.writes_calls) == (name, True, True)
    messages, tools = format.prepare_messages(CONVERSATION, [WEATHER, CLOCK])
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
    text = ChatTemplate(TEMPLATES[name], Letters()).render(messages, tools=tools)
    assert "Köln" in text and "weather" in text
    assert format.prepare_messages(CONVERSATION[:1], []) == (CONVERSATION[:1], None)
    if name == "llama3":  # which knows one call a message
        assert [m["role"] for m in messages] == ["user", *["assistant", "tool"] * 2, "user"]
    if name.startswith("mistral"):
        assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)


def test_syntaxes_that_are_not_read_here_become_words() -> None:
    for inside in ('<parameter name="x">', "f\n<arg_key>x</arg_key>"):
        template = TEMPLATES["hermes"] + "{{ '<tool_call>" + inside + "' }}"
        assert tool_format(template.replace("\n", "\\n"), Letters()).name == "generic"
    knows_no_tools = TEMPLATES["hermes"].replace(TOOLS, "")
    assert tool_format(knows_no_tools, Letters()).name == "generic"
    # A template that writes tools but leaves calls out: they become part of the content.
    silent = TOOLS + "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<tool_call>' }}"
    format = tool_format(silent + "{# arguments #}", Letters())
    assert (format.name, format.writes_calls) == ("hermes", False)
    assert format.prepare_messages(CONVERSATION, [CLOCK])[0][1]["content"].startswith(
        "<tool_call>\n{"
    )


@pytest.mark.parametrize(
    ("family", "name"), [("qwen", "hermes"), ("mistral", "mistral"), ("deepseek", "generic")]
)
def test_real_templates(family: str, name: str) -> None:
    tokenizer = Tokenizer.from_file(assets.tokenizer_json_folder() / family)
    format = tool_format(tokenizer.chat_template, tokenizer)
    assert format.name == name
    answered = [*CONVERSATION[:4], {"role": "assistant", "content": "Wet."}, CONVERSATION[4]]
    messages, tools = format.prepare_messages(answered, [WEATHER, CLOCK])
    prompt = ChatTemplate(tokenizer.chat_template, tokenizer).encode(messages, tools=tools)
    assert '"name": "weather"' in prompt.text and "Köln" in prompt.text and "noon" in prompt.text
    if family == "qwen":  # the template writes what its model is to write
        written = format.write_calls([{"name": "weather", "arguments": {"city": "Köln"}}])
        assert written in prompt.text
    if family == "mistral":  # by ids: control tokens that have no text
        ids = prompt.ids[prompt.ids.index(format.controls["[TOOL_CALLS]"]) :]
        control = tokenizer.special_ids
        reader = ToolCallParser(format)
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
    "which is in no message before it": [{"role": "user", "content": "x"},
                                         {"role": "tool", "tool_call_id": "9", "content": "x"}],
    "answers the tool call None": [{"role": "tool", "content": "x"}],
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
@pytest.mark.parametrize("name", ["generic", "hermes"])
def test_bad_calls_and_results(why: str, name: str) -> None:
    with pytest.raises(UnspoolError, match=why) as caught:
        format_of(name).prepare_messages(BAD[why], [CLOCK])
    assert str(caught.value).startswith("message ") and "\n" not in str(caught.value)


def fits(lm: Any, grammar: str, text: str, controls: dict[str, int]) -> bool:
    """Whether a grammar takes a text in which control tokens are spelled."""
    state = Grammar.compile(GrammarSpec.lark(grammar), lm.grammar_vocabulary).start()
    for mark, token in controls.items():
        text = text.replace(mark, f"\0{token}\0")
    ids: list[int] = []
    for i, part in enumerate(text.split("\0")):
        ids += [int(part)] if i % 2 else lm.tokenizer.encode(part)
    return state.num_accepted(ids) == len(ids) and (state._advance_many(ids), state.is_complete)[1]


@pytest.mark.parametrize("name", ["generic", *TEMPLATES])
@pytest.mark.parametrize("control", [False, True])
def test_grammars_take_calls_and_nothing_else(lm: Any, name: str, control: bool) -> None:
    format = format_of(name)
    if control:  # ids that are control tokens of the model at hand
        marks = [format.begin, *([format.end] if format.end else []), "[ARGS]"]
        format = replace(format, controls={mark: 5 + i for i, mark in enumerate(marks)})
    spelled = format.controls if format.in_template else {}
    if format.named:
        first, second = "[TOOL_CALLS]clock[ARGS]{}", '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}'
        first_and_second, wrong = first + second, "[TOOL_CALLS]watch[ARGS]{}"
    else:
        call = {"name": "clock", "arguments": {}}
        other = {"name": "weather", "arguments": {"city": "Ulm"}}
        first, second, first_and_second = (
            format.write_calls(calls) for calls in ([call], [other], [call, other])
        )
        wrong = format.write_calls([{**call, "name": "watch"}])
    single = format.grammar([CLOCK, WEATHER], parallel=False)
    several = format.grammar([CLOCK, WEATHER], parallel=True)
    for text in (first, second):
        assert fits(lm, single, text, spelled) and fits(lm, several, text, spelled)
    assert fits(lm, several, first_and_second, spelled) and not fits(
        lm, single, first_and_second, spelled
    )
    for text in (wrong, "Hello", "", second.replace("Ulm", "much too long"), first + "x"):
        assert not fits(lm, several, text, spelled)
    with pytest.raises(UnspoolError, match="there are no tools"):
        format.grammar([], parallel=False)


def test_the_default_model_calls_when_it_must(lm: Any) -> None:
    format = tool_format(lm.tokenizer.chat_template, lm.tokenizer)
    assert format.name == "generic" and format.takes_system
    unit = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10},
            "unit": {"enum": ["C", "F"]}}, "required": ["city", "unit"]}  # fmt: skip
    tools = [ToolSpec("weather", "The weather of a city", unit), CLOCK]
    messages, tool_schemas = format.prepare_messages(
        [{"role": "user", "content": "Is it raining in Paris?"}], tools
    )
    answer = lm.chat(
        messages, tools=tool_schemas, grammar=format.grammar(tools, parallel=False), temperature=0
    )
    assert answer.finish_reason != "length"
    reader = ToolCallParser(format, required=True)
    pieces = [piece for step in answer.steps for piece in reader.push(step.token, step.text)]
    pieces += reader.finish()
    assert not any(isinstance(piece, TextPiece) for piece in pieces)
    (call,) = reader.calls
    arguments = json.loads(call.arguments)
    assert call.name == "clock" or arguments["unit"] in ("C", "F")
