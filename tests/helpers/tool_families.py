"""Short templates of each family that writes tool calls, and readers of what they write."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from unspool.text.tools.formats import ToolFormat, ToolSpec, tool_format
from unspool.text.tools.parser import (
    Piece,
    TextPiece,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallParser,
    ToolCallStart,
)

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8, "description": "note: where"}},
    "required": ["city"],
}
WEATHER = ToolSpec("weather", "The weather of a city", CITY)
CLOCK = ToolSpec("clock", "The time of day")


def _calls(before: str, behind: str) -> str:
    call = "{{ c.function | tojson }}"
    return f"{{{{ '{before}' }}}}{call}{{{{ '{behind}' }}}}{{% endfor %}}\n{{% endfor %}}"


# Templates that spell what the real ones of each family spell, as short as can be.
TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TEMPLATES = {
    "hermes": TOOLS + TURNS + _calls("<tool_call>", "</tool_call>") + "{# arguments #}",
    "mistral": TOOLS + TURNS + _calls("[TOOL_CALLS][", "]"),
    "mistral-args": TOOLS + TURNS + "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    "granite": TOOLS + TURNS + _calls("<|tool_call|>[", "]"),
    "phi-tags": TOOLS + TURNS + _calls("<|tool_call|>", "<|/tool_call|>"),
    "phi": TOOLS + "{{ 'functools[...]' }}" + TURNS + _calls("", ""),
    "xml": TOOLS + TURNS + "<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}\n{% endfor %}",
    "gemma": TOOLS + TURNS + "<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}:<|\"|>{{ v }}<|\"|>{% endfor %}"
    "{{ '}' }}"
    "<tool_call|>{% endfor %}\n{% endfor %}",
    "lfm2": TOOLS + TURNS + "<|tool_call_start|>[{{ c.function.name }}("
    "{% for k, v in c.function.arguments | items %}{{ k }}='{{ v }}'{% endfor %})]"
    "<|tool_call_end|>{% endfor %}\n{% endfor %}",
    "llama3": TOOLS + """{{ '{"name": function name, "parameters": its arguments}' }}"""
    + TURNS + _calls("", ""),
}  # fmt: skip
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Letters:
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
    return tool_format(template, Letters(*controls))


def read(reader: ToolCallParser, *parts: str | int) -> list[Piece]:
    """Pieces of texts and control tokens, joined where they may be."""
    pieces: list[Piece] = []
    for part in parts:
        pieces += reader.push(-1, part) if isinstance(part, str) else reader.push(part, "")
    joined: list[Piece] = []
    for piece in pieces + reader.finish():
        last = joined[-1] if joined else None
        if isinstance(piece, TextPiece | ToolCallArguments) and type(piece) is type(last):
            joined[-1] = replace(last, text=last.text + piece.text)
        else:
            joined.append(piece)
    return joined


def summary(pieces: list[Piece]) -> list[Any]:
    """Pieces in short: texts as they are, calls as (name, arguments); checks their order."""
    short: list[Any] = []
    index = 0
    while pieces:
        first, *pieces = pieces
        if isinstance(first, TextPiece):
            short.append(first.text)
            continue
        assert isinstance(first, ToolCallStart) and first.index == index
        arguments, ended, *pieces = pieces
        assert isinstance(arguments, ToolCallArguments) and arguments.index == index
        assert ended == ToolCallEnd(index)
        short.append((first.name, arguments.text))
        index += 1
    return short
