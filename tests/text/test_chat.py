"""Chat templates: the same ids as transformers, wherever a template puts the messages."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from test_tokenizer_json import load_tokenizer as from_json
from transformers import PreTrainedTokenizerFast

from helpers import assets
from helpers.chat_support import (
    CHATML,
    GEMMA,
    HELLO,
    LLAMA3,
    MISTRAL,
    QWEN_THINK,
    SYSTEM,
    TEMPLATES,
    check_same,
    check_spans,
    words_of,
)
from unspool.errors import SettingsError, UnspoolError
from unspool.text.chat.sandbox import UNKNOWN, SandboxedTemplate, origin_of, with_origin
from unspool.text.chat.template import ChatTemplate


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [False, True])
def test_ids_equal_transformers(built: Any, name: str, system: bool) -> None:
    if system and name == "gemma":
        chat = ChatTemplate(GEMMA, built[0])
        with pytest.raises(UnspoolError, match="System role not supported"):
            chat.render_as_is(SYSTEM)
        joined = "\n\n".join(message["content"] for message in SYSTEM[:2])
        merged = [{"role": "user", "content": joined}, *SYSTEM[2:]]
        assert chat.encode(SYSTEM) == chat.encode(merged)
        return
    messages = SYSTEM if system else HELLO
    for options in ({}, {"add_generation_prompt": False}):
        prompt = check_same(*built, TEMPLATES[name], messages, **options)
        for message, words in zip(messages, words_of(built[0], prompt), strict=True):
            assert message["content"].strip() in words
    check_same(*built, TEMPLATES[name], messages[:-1], continue_final_message=True)


# The others take transformers and us three to ten seconds to read.
_LARGE = ("qwen", "llama3", "gemma", "deepseek")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in _LARGE]


@pytest.mark.parametrize("family", ["mistral", *SLOW])
def test_real_vocabularies_equal_transformers(family: str) -> None:
    folder = assets.tokenizer_json_folder() / family
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        names[key] = value["content"] if isinstance(value, dict) else value
    names = {key: value for key, value in names.items() if value}
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    tokenizer = from_json(family)
    templates = {"llama3": LLAMA3, "gemma": GEMMA}
    template = config.get("chat_template") or templates[family]
    for messages in (HELLO, SYSTEM):
        if family == "gemma" and messages is SYSTEM:
            continue
        check_same(tokenizer, oracle, template, messages)
        check_same(tokenizer, oracle, template, messages[:-1], continue_final_message=True)
    chat = ChatTemplate(template, tokenizer)
    spelled = " ".join(text for text in tokenizer.special_tokens if text.strip())
    calm = chat.encode([{"role": "user", "content": "a b"}])
    prompt = chat.encode([{"role": "user", "content": spelled}])
    control = tokenizer.special_ids - {tokenizer.unk_id}
    assert [i for i in prompt.ids if i in control] == [i for i in calm.ids if i in control]
    assert spelled in tokenizer.decode(prompt.ids)


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Wetter für <Ort> & é",
          "parameters": {"type": "object", "properties": {"city": {"type": "text"}}}}}]  # fmt: skip


def test_tools_thinking_and_reasoning(built: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "thinking": "hm\n"},
        {"role": "tool", "content": "12 degrees", "name": "weather", "tool_call_id": "1"},
    ]
    check_same(*built, QWEN_THINK, messages, tools=TOOLS)
    check_same(*built, QWEN_THINK, messages, tools=TOOLS, enable_thinking=False)
    # The template takes the thinking out of the content itself, although the tags are tokens.
    with_reasoning = [HELLO[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}]
    check_same(*built, QWEN_THINK, with_reasoning)
    check_same(*built, QWEN_THINK, [*with_reasoning, HELLO[2]])


METHODS = [
    "{{ c.split('<t>') }}", "{{ c.split('<t>', 1) }}", "{{ c.rsplit('<t>', 1) }}",
    "{{ c.partition('<t>') }}", "{{ c.rpartition('<t>') }}", "{{ c.replace('<t>', '[') }}",
    "{{ c.replace('<t>', '!', 1) }}", "{{ c | replace('t>', '!') }}", "{{ c.strip('<> ') }}",
    "{{ c.lstrip('<t') }}|{{ c.rstrip('>t') }}", "{{ c.startswith('<t>') }}",
    "{{ c.endswith(('t>', 'x')) }}", "{{ '<t>' in c }}", "{{ c == '<t>' }}", "{{ c in ['<t>'] }}",
    "{{ c.find('t>') }}", "{{ c.count('<') }}", "{{ c[1:] }}", "{{ c[:-2] }}", "{{ c[::2] }}",
    "{{ c[0] }}{{ c[-1] }}", "{{ c | length }}", "{{ c.removeprefix('<t') }}", "{{ c | trim }}",
    "{{ c.removesuffix('t>') }}", "{{ c | capitalize }}{{ c.capitalize() }}", "{{ c | upper }}",
    "{{ [c] }}", "{{ c | tojson(ensure_ascii=true) }}", "{{ {c: c} | tojson }}", "{{ c | int }}",
    "{{ c.splitlines() }}", "{{ c.split() }}", "{{ c is in ['<t>', 't'] }}", "{{ c ~ '<t>' }}",
    "{% for p in c.split('<') %}{{ loop.index }}{{ p }}{% endfor %}", "{{ {'t': 1}[c] }}",
    "{{ '{:>9}'.format('x') }}{{ '%s!' % c }}", "{{ c is string }}{{ c is mapping }}",
    "{{ ('<' | safe) + c + '>' }}{{ c + (c | e) }}{{ (c | e) ~ c }}{{ c | e | e }}",
    "{{ c.title() }}", "{{ c.index('t') if 't' in c else 0 }}", "{{ c | urlencode }}",
]  # fmt: skip


@cache
def _compiled(source: str) -> tuple[SandboxedTemplate, Template]:
    """Ours, and Jinja's own."""
    plain = ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = json.dumps
    return SandboxedTemplate(source), plain.from_string(source)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="<t> a\n1", max_size=10))
def test_templates_do_not_notice_origins(content: str) -> None:
    for source in METHODS:
        compiled, plain = _compiled(source)
        text = compiled.render({"c": with_origin(content, UNKNOWN)})
        assert text == plain.render({"c": content}), source
        assert len(origin_of(text)) == len(text), source


def test_continuing_a_half_written_turn(built: Any) -> None:
    messages = [HELLO[0], {"role": "assistant", "content": "The leaves <b"}]
    prompt = check_same(*built, CHATML, messages, continue_final_message=True)
    assert prompt.text.endswith("<|im_start|>assistant\nThe leaves <b")
    assert prompt.generation is None and prompt.spans[-1].role == "assistant"
    trimmed = [HELLO[0], {"role": "assistant", "content": "The leaves "}]
    assert check_same(*built, LLAMA3, trimmed, continue_final_message=True).text.endswith("leaves")
    with pytest.raises(SettingsError, match="only one"):
        ChatTemplate(CHATML, built[0]).encode(
            messages, continue_final_message=True, add_generation_prompt=True
        )
    with pytest.raises(UnspoolError, match="omits the last message"):
        ChatTemplate("{{ messages[0].content }}", built[0]).encode(
            messages, continue_final_message=True
        )


def test_continuing_a_message_without_words(built: Any) -> None:
    for content, end in (("", "assistant\n"), (" ", "assistant\n ")):
        messages = [HELLO[0], {"role": "assistant", "content": content}]
        chat = ChatTemplate(CHATML, built[0])
        assert chat.render(messages, continue_final_message=True).endswith(end)
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    text = ChatTemplate(LLAMA3, built[0]).render(messages, continue_final_message=True)
    assert text.endswith(header)


def test_messages_are_found_wherever_the_template_puts_them(built: Any) -> None:
    collected = (
        "{% set ns = namespace(t='') %}{% for m in messages %}"
        "{% set ns.t = ns.t ~ '<|im_start|>' ~ m.role ~ ':' ~ m.content ~ '<|im_end|>' %}"
        "{% endfor %}{{ ns.t }}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    turns = [{"role": role, "content": "same"} for role in ("system", "user", "assistant", "user")]
    prompt = ChatTemplate(collected, built[0]).encode(turns)
    assert words_of(built[0], prompt) == [f"<|im_start|>{m['role']}:same<|im_end|>" for m in turns]
    assert prompt.generation is not None and prompt.generation.start == len(prompt.ids) - 1
    inside = ChatTemplate(MISTRAL, built[0]).encode(turns[:3])
    assert words_of(built[0], inside) == ["<s>[INST] same", "\n\nsame [/INST]", " same</s>"]


def test_plain_lines_without_a_template(built: Any) -> None:
    chat = ChatTemplate(None, built[0])
    prompt = chat.encode(SYSTEM)
    assert prompt.text == (
        "<s>System: Be brief & kind.\nUser: Hello there, is 1 < 2 > 0 [yes]?\n"
        "Assistant: Hi! It is so.\nUser: Why do leaves change color in fall?\nAssistant:"
    )
    assert prompt.ids[0] == built[0].bos_id
    assert words_of(built[0], prompt)[2] == "Assistant: Hi! It is so.\n"
    half = chat.render(SYSTEM[:3], continue_final_message=True)
    assert half.endswith("Assistant: Hi! It is so.")
    assert chat.is_plain and "\nUser:" in chat.stops


def test_text_parts(built: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"text": "two"}]}]
    assert "one\ntwo<|im_end|>" in ChatTemplate(CHATML, built[0]).render(parts)
    reads = "{% for m in messages %}{% for p in m.content %}{{ p.text }}+{% endfor %}{% endfor %}"
    assert ChatTemplate(reads, built[0]).render(parts) == "one+two+"
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    with pytest.raises(UnspoolError, match="only text is supported"):
        ChatTemplate(CHATML, built[0]).render(picture)


DEEP: list[Any] = []
for _ in range(500):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "messages",
    [[], "hello", {"role": "user", "content": "x"}, None, ["hello"], [{"content": "x"}],
     [{"role": "user"}], [{"role": 3, "content": "x"}], [{"role": "user", "content": 3}],
     [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": "x", "f": print}],
     [{"role": "user", "content": "x", "f": DEEP}],
     [{"role": "user", "content": "x", "f": {(): 1}}]],
)  # fmt: skip
def test_bad_messages(built: Any, messages: Any) -> None:
    with pytest.raises(UnspoolError) as caught:
        ChatTemplate(CHATML, built[0]).encode(messages)
    assert "\n" not in str(caught.value)


def test_nul_and_every_rare_character(built: Any) -> None:
    content = "a\0b" + "".join(map(chr, range(0xA000, 0xA48D)))
    prompt = ChatTemplate(CHATML, built[0]).encode([{"role": "user", "content": content}])
    assert content in prompt.text and built[0].decode(prompt.ids) == prompt.text


def test_many_messages_do_not_use_up_the_budget(built: Any) -> None:
    builds = (
        "{% set ns = namespace(t='') %}{% for m in messages %}"
        "{% set ns.t = ns.t + '<|im_start|>' + m.content %}{% endfor %}{{ ns.t }}"
    )
    messages = [{"role": "user", "content": "word " * 100}] * 1000
    assert len(ChatTemplate(builds, built[0]).render(messages)) > 500_000
    messages = [dict(message) for message in messages]
    prompt = ChatTemplate(QWEN_THINK, built[0]).encode(messages)
    check_spans(prompt, messages)


def test_a_start_token_is_not_doubled(built: Any) -> None:
    """A prompt that spells it already, as an applied template does, has it once."""
    tokenizer = built[0]
    once = [tokenizer.bos_id, *tokenizer.encode("hell")]
    assert tokenizer.encode_prompt("<s>hell", specials=True) == once
    assert tokenizer.encode_prompt("hell", specials=True) == once
    as_text = tokenizer.encode_prompt("<s>hell")
    assert as_text[0] == tokenizer.bos_id and tokenizer.bos_id not in as_text[1:]
    rendered = ChatTemplate(MISTRAL, tokenizer).encode(SYSTEM)
    assert tokenizer.encode_prompt(rendered.text, specials=True) == rendered.ids
