"""Short templates of each way to think, and a vocabulary of letters in which they can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

from helpers.tool_families import Letters
from helpers.word_model import save_worded

_TURNS = "{% for m in messages %}<|turn|>{{ m.role }}\n"
_ASKS = "{% if add_generation_prompt %}<|turn|>assistant\n"

# Templates that say what the real ones say about thoughts, as short as can be.
QWEN = (  # thinks unless told not to; earlier thoughts are left out
    _TURNS + "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n"
    "{% endfor %}" + _ASKS
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)  # fmt: skip
QWEN_OPEN = QWEN.replace(  # the prompt opens the thought
    "{% endif %}{% endif %}", "{% else %}<think>\n{% endif %}{% endif %}"
)
GEMMA = (  # thinks only when told to
    "{% if enable_thinking %}<|turn>system\n<|think|><turn|>\n{% endif %}"
    "{% for m in messages %}<|turn>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<|channel>thought\n{{ m.reasoning_content }}"
    "<channel|>{% endif %}{{ m.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}"
    "{% if m.thinking and loop.last and not add_generation_prompt %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MISTRAL = (  # [THINK] is the model's own idea; the template only knows how to write it
    "{% for m in messages %}{{ m.role }}:{% if m.thinking %}[THINK]{{ m.thinking }}[/THINK]"
    "{% endif %}{{ m.content }}\n{% endfor %}"
)
STRIPS = (  # says only where a thought ended
    "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"

CONTROLS = {
    GEMMA: ("<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|think|>"),
    HARMONY: (
        "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>",
        "<|return|>",
    ),
    MISTRAL: ("[THINK]", "[/THINK]"),
}  # fmt: skip


def save_thinker(folder: Path, template: str, *words: str) -> Path:
    """A tiny random checkpoint with this template, and control tokens for its marks."""
    marks = CONTROLS.get(template, ("<|turn|>", "<|end|>", "<think>", "</think>"))
    save_worded(folder, (*marks, *words))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return folder


class Marked(Letters):
    """Letters, control tokens without a text, and words that are one token with one."""

    def __init__(self, template: str | None, *words: str) -> None:
        super().__init__(*CONTROLS.get(template or "", ()))
        self.chat_template = template
        self.words = {word: 0x120000 + i for i, word in enumerate(words)}

    @property
    def _token_ids(self) -> dict[str, int]:
        return {**self.special_tokens, **self.words}

    def encode(self, text: str, *, specials: bool = False, bos: bool = False) -> list[int]:
        vocabulary = self._token_ids if specials else self.words
        pattern = "|".join(map(re.escape, sorted(vocabulary, key=len, reverse=True))) or "(?!)"
        ids: list[int] = []
        for part in re.split(f"({pattern})", text):
            ids += [vocabulary[part]] if part in vocabulary else [ord(letter) for letter in part]
        return ids

    def token_text(self, token: int) -> str:
        text_by_id = {number: text for text, number in self._token_ids.items()}
        return text_by_id[token] if token in text_by_id else chr(token)

    def token_bytes(self, token: int) -> bytes:
        return self.token_text(token).encode()

    def display_text(self, token: int) -> str:
        """What a step shows of a token: control tokens have no text."""
        return "" if token in self.special_tokens.values() else self.token_text(token)
