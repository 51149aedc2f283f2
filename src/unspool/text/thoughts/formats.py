"""How a model sets its thoughts apart from its answer.

    format = thought_format(tokenizer.chat_template, tokenizer)     # None: it has no thoughts
    start = format.start(prompt_ids)                                # where the answer begins
    reader = answer_reader(format, start, calls)                    # reader.py

Most models write them between two marks (`<think>` and `</think>`); gpt-oss writes messages in
channels, of which one is for thoughts (`channels.py`). Which marks a model has is said by its chat
template, or else by its vocabulary; never by its name. How a thought is closed, up to the answer's
first word, is seen by rendering one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unspool.errors import UnspoolError
from unspool.text.chat.template import ChatTemplate, TokenizerLike

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"

# Open mark, close mark, and what stands behind the open mark and is no thought yet.
_MARKS = (
    ("<|channel>", "<channel|>", "thought\n"),
    ("<think>", "</think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<thinking>", "</thinking>", ""),
    ("<seed:think>", "</seed:think>", ""),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
)
# What templates call it, true or false; the second is also the name of messages' own thoughts.
_SWITCHES = {
    "enable_thinking": r"\benable_thinking\b",
    "thinking": r"\bif (not )?thinking\b|(?<![.\w'\"])thinking is (not )?defined",
}
_EFFORT = "reasoning_effort"
_TAIL = 32  # tokens at a prompt's end in which marks of several tokens are looked for


@dataclass(frozen=True)
class Start:
    """Where an answer begins: before a thought, inside one, or behind it, where words come."""

    place: Literal["before", "inside", "behind"] = "before"
    header: str = ""  # of a message in a channel: what the prompt has of it already


@dataclass(frozen=True)
class ThoughtFormat:
    """The marks of one model's thoughts."""

    open: str
    close: str
    head: str = ""
    opening: str = ""  # what begins a thought: the open mark, and a line break where it has one
    closing: str = ""  # what ends one and leads to the answer: "\n</think>\n\n"
    channels: bool = False
    switch: str | None = None  # the template's word for whether to think
    efforts: bool = False  # the template knows reasoning_effort
    ids: Mapping[str, int] = field(default_factory=dict)  # marks that are one token
    controls: Mapping[str, int] = field(default_factory=dict)  # ... that has no text
    opening_ids: tuple[int, ...] = ()
    close_ids: tuple[int, ...] = ()  # of the closing, up to its mark ...
    behind_ids: tuple[int, ...] = ()  # ... and from there to the answer

    def asked(
        self, think: bool | str | None, budget: int | None
    ) -> tuple[dict[str, Any], int | None]:
        """What the template is told, and the budget: `think` is a switch, or how much effort.

        Not to think is a budget of nothing, too: not every model can be told, or obeys.
        """
        told: dict[str, Any] = {}
        if think is None:
            return told, budget
        wanted = think not in (False, "none")
        if self.efforts:
            efforts = {True: "medium", False: "low", "none": "low"}
            told[_EFFORT] = efforts.get(think, think)
        if self.switch is not None:
            told[self.switch] = wanted
        return told, budget if wanted else 0

    def start(self, prompt: Sequence[int], text: str) -> Start:
        """Where the answer to a prompt begins. `text` is that of its last tokens, control tokens
        spelled."""
        if self.channels:
            return self._start_in_channel(prompt, text)
        if self.open in self.ids and self.close in self.ids:
            marks = (self.ids[self.open], self.ids[self.close])
            last = next((at for at in reversed(range(len(prompt))) if prompt[at] in marks), None)
            if last is None:
                return Start()
            if prompt[last] == marks[0]:
                return Start("inside")
        opened, closed = text.rfind(self.open), text.rfind(self.close)
        if closed > opened and not text[closed + len(self.close) :].strip():
            return Start("behind")
        if opened > closed and not text[opened + len(self.open) :].strip():
            return Start("inside")
        return Start()

    def _start_in_channel(self, prompt: Sequence[int], text: str) -> Start:
        message, start = self.ids.get(MESSAGE), self.ids.get(START)
        begun = next((at for at in reversed(range(len(prompt))) if prompt[at] == start), None)
        if begun is None or message not in prompt[begun:]:
            return Start(header=text.rpartition(START)[2] if START in text else "")
        is_thought = text.rpartition(CHANNEL)[2].startswith("analysis")
        return Start("inside" if is_thought else "behind")


def tail_of(prompt: Sequence[int]) -> Sequence[int]:
    """The tokens of a prompt whose text `ThoughtFormat.start` wants to see."""
    return prompt[-_TAIL:]


def thought_format(template: str | None, tokenizer: TokenizerLike) -> ThoughtFormat | None:
    """How a model with this template and vocabulary thinks; None: it does not."""
    source = template or ""
    known = {mark: ids[0] for mark in _all_marks() if len(ids := _encoded(tokenizer, mark)) == 1}
    controls = {mark: token for mark, token in tokenizer.special_tokens.items() if mark in known}
    words: dict[str, Any] = {
        "switch": next((name for name, use in _SWITCHES.items() if re.search(use, source)), None),
        "efforts": _EFFORT in source,
        "ids": known,
        "controls": controls,
    }
    if CHANNEL in source and MESSAGE in source:
        opening = f"{CHANNEL}analysis{MESSAGE}"
        closing = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
        found = ThoughtFormat(
            CHANNEL, END, opening=opening, closing=closing, channels=True, **words
        )
        return _spelled(found, tokenizer)
    marks = next((m for m in _MARKS if m[1] in source), None) or next(
        (m for m in _MARKS if m[0] in known and m[1] in known), None
    )
    if marks is None:
        return None
    opening, closing = _rendered(template, tokenizer, *marks)
    return _spelled(ThoughtFormat(*marks, opening=opening, closing=closing, **words), tokenizer)


def _all_marks() -> list[str]:
    return [*(mark for marks in _MARKS for mark in marks[:2]), CHANNEL, MESSAGE, START, END]


def _encoded(tokenizer: TokenizerLike, text: str) -> list[int]:
    return tokenizer.encode(text, specials=True) if text else []


def _spelled(found: ThoughtFormat, tokenizer: TokenizerLike) -> ThoughtFormat:
    end = found.closing.index(found.close) + len(found.close)
    return replace(
        found,
        opening_ids=tuple(_encoded(tokenizer, found.opening)),
        close_ids=tuple(_encoded(tokenizer, found.closing[:end])),
        behind_ids=tuple(_encoded(tokenizer, found.closing[end:])),
    )


# What is rendered to see how a template writes a thought and its answer.
_THOUGHT, _ANSWER = "probe of thoughts", "probe of answers"
_TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT},
]


def _rendered(
    template: str | None, tokenizer: TokenizerLike, open: str, close: str, head: str
) -> tuple[str, str]:
    """How a thought is begun and ended; as is usual, where the template writes no thoughts."""
    usual = (f"{open}{head}", close) if head else (f"{open}\n", f"{close}\n\n")
    if template is None:
        return usual
    try:
        text = ChatTemplate(template, tokenizer).render_as_is(_TURNS, add_generation_prompt=False)
    except UnspoolError:
        return usual
    before, thought, rest = str(text).partition(_THOUGHT)
    between, answer, _ = rest.partition(_ANSWER)
    if not (thought and answer and open in before and close in between):
        return usual
    return before[before.rindex(open) :], between
