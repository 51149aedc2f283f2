"""Chat templates as models have them, and a tokenizer that knows their control tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from unspool.text.chat.template import ChatPrompt, ChatTemplate
from unspool.text.tokenizer.tokenizer import Tokenizer

CHATML = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""  # noqa: E501

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + strftime_now("%d %b %Y") + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""  # noqa: E501

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""  # noqa: E501

MISTRAL = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{{ bos_token }}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if loop.first and system_message %}{% set content = system_message + '\n\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501

QWEN_THINK = """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n<|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}{%- set ns.last = index %}{% break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and reasoning %}{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) ~ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' ~ message.content ~ '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""  # noqa: E501

GENERATION = """{% for message in messages %}<|im_start|>{{ message.role }}
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% endfor %}"""

TEMPLATES = {
    "chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen": QWEN_THINK,
    "generation": GENERATION,
}  # fmt: skip
CONTROLS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
]  # fmt: skip
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]  # not special

HELLO = [
    {"role": "user", "content": "Hello there, is 1 < 2 > 0 [yes]?"},
    {"role": "assistant", "content": "Hi! It is so. "},
    {"role": "user", "content": "  Why do leaves change color in fall?\n"},
]
SYSTEM = [{"role": "system", "content": "Be brief & kind."}, *HELLO]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """A byte-level tokenizer with every control token of the templates above."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("Ċ", "Ċ"), ("he", "ll"), ("i", "m"), ("<", "|")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROLS])
    library.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    folder = tmp_path_factory.mktemp("tokenizer")
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    oracle = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    return Tokenizer.from_file(folder), oracle


def check_same(
    tokenizer: Tokenizer, oracle: Any, template: str, messages: list[Any], **options: Any
) -> ChatPrompt:
    prompt = ChatTemplate(template, tokenizer).encode(messages, **options)
    if "continue_final_message" not in options:
        options.setdefault("add_generation_prompt", True)
    assert prompt.text == oracle.apply_chat_template(
        messages, chat_template=template, tokenize=False, **options
    )
    assert prompt.ids == oracle.apply_chat_template(
        messages, chat_template=template, return_dict=False, **options
    )
    check_spans(prompt, messages)
    return prompt


def check_spans(prompt: ChatPrompt, messages: list[Any]) -> None:
    spans = [*prompt.spans, *([prompt.generation] if prompt.generation else [])]
    assert [span.role for span in prompt.spans] == [message["role"] for message in messages]
    edges = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1] and edges[-1] == len(prompt.ids)


def words_of(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[str]:
    return [tokenizer.decode(prompt.ids[span.start : span.end]) for span in prompt.spans]
