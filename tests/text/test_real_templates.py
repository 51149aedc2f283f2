"""The chat templates of published models: how they think and call, and that they take it back."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers import assets
from helpers.thought_families import Marked
from helpers.tool_families import WEATHER
from unspool.text.chat.template import ChatTemplate
from unspool.text.reasoning import prompt_tail, reasoning_format
from unspool.text.tools.formats import tool_format

TAGS = ("<think>", "</think>")
MARK = re.compile(r"<\|[\w\"]+\|?>|<[\w\"]+\|>|\[/?[A-Z_]{4,}\]")
CALLED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "An old thought.",
     "tool_calls": [{"id": "call_1", "type": "function",
                     "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
]  # fmt: skip
ASKED = [*CALLED, {"role": "assistant", "content": "Wet.", "reasoning_content": "A late thought."},
         {"role": "user", "content": "And now?"}]  # fmt: skip

# File -> how it thinks (mark, closing, where an answer begins, and when told not to), how it calls.
KNOWN = {
    "Qwen-Qwen3-0.6B": ("<think>", "\n</think>\n\n", "before", "behind", "hermes"),
    "Qwen3.5-4B": ("<think>", "\n</think>\n\n", "inside", "behind", "xml"),
    "Qwen3-Coder": ("<think>", "</think>\n\n", "before", None, "xml"),
    "google-gemma-4-31B-it": ("<|channel>", "<channel|>", "behind", "behind", "gemma"),
    "openai-gpt-oss-120b": (
        "<|channel|>", "<|end|><|start|>assistant<|channel|>final<|message|>", "before", None,
        "harmony",
    ),
    "LFM2.5-8B-A1B": ("<think>", "</think>", "before", None, "lfm2"),
    "mistralai-Ministral-3-14B-Reasoning-2512": (
        "[THINK]", "[/THINK]\n\n", "before", None, "mistral-args"
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (
        "<think>", "</think>\n\n", "inside", None, "generic"
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        "<think>", "\n</think>\n", "inside", "behind", "xml"
    ),
}  # fmt: skip


class Spelled(Marked):
    """A vocabulary that has each mark of a template as a control token, and think tags as text."""

    bos_id = eos_id = ord("|")

    def __init__(self, template: str) -> None:
        super().__init__(template, *TAGS)
        marks = sorted({*MARK.findall(template), "<|constrain|>", "<|call|>", "<|return|>"})
        self.special_tokens = {mark: 0x110000 + number for number, mark in enumerate(marks)}


@pytest.mark.parametrize("name", KNOWN)
def test_published_templates(name: str) -> None:
    source = (assets.chat_templates() / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = Spelled(source)
    chat, format = ChatTemplate(source, tokenizer), reasoning_format(source, tokenizer)
    mark, closing, place, place_off, calls = KNOWN[name]
    assert format is not None and (format.open, format.closing) == (mark, closing)

    def begins(**options: Any) -> str:
        ids = chat.encode(ASKED[1:2], **options).ids
        return format.start(ids, "".join(map(tokenizer.token_text, prompt_tail(ids)))).state

    assert begins() == place
    if place_off is not None:
        assert begins(**format.template_options(False, None)[0]) == place_off
    tools = tool_format(source, tokenizer)
    assert tools.name == calls
    messages, tool_schemas = tools.prepare_messages(ASKED, [WEATHER])
    text = chat.render(messages, tools=tool_schemas)
    assert "weather" in text and "Ulm" in text and "wet" in text and "And now?" in text
    assert "An old thought." not in text and "A late thought." not in text
    messages, tool_schemas = tools.prepare_messages(
        CALLED, [WEATHER]
    )  # reasoning continues after the result
    rendered = chat.render(messages, tools=tool_schemas)
    keeps = name.startswith(("Qwen-", "Qwen3.5", "google", "openai", "LFM2.5", "NVIDIA"))
    assert ("An old thought." in rendered) == keeps
