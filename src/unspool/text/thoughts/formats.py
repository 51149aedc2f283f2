"""Reasoning formats: how a model separates reasoning from its answer.

    format = thought_format(tokenizer.chat_template, tokenizer)     # None: no reasoning
    start = format.start(prompt_ids, text)                          # where the answer begins
    reader = answer_reader(format, start, calls)

Most models write reasoning between two marks (`<think>` and `</think>`); gpt-oss writes messages in
channels, one of which is for reasoning. The marks come from the chat template, or else from the
vocabulary; never from the model's name. How reasoning is closed, up to the first word of the
answer, is found by rendering an example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unspool.errors import UnspoolError
from unspool.text.chat.template import ChatTemplate, TokenizerLike

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"

# Open mark, close mark, and text after the open mark that is not reasoning yet.
_MARKS = (
    ("<|channel>", "<channel|>", "thought\n"),
    ("<think>", "</think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<thinking>", "</thinking>", ""),
    ("<seed:think>", "</seed:think>", ""),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
)
# Template variables that switch reasoning on or off; "thinking" is also a key of messages.
_SWITCHES = {
    "enable_thinking": r"\benable_thinking\b",
    "thinking": r"\bif (not )?thinking\b|(?<![.\w'\"])thinking is (not )?defined",
}
_EFFORT = "reasoning_effort"
_TAIL = 32  # tokens at the end of a prompt that are searched for marks of several tokens


@dataclass(frozen=True)
class OutputStart:
    """Where an output begins: before reasoning, inside it, or after it, in the answer."""

    state: Literal["before", "inside", "behind"] = "before"
    header: str = ""  # part of a harmony header that is in the prompt


@dataclass(frozen=True)
class ReasoningFormat:
    """The reasoning marks of one model."""

    open: str
    close: str
    head: str = ""
    opening: str = ""  # begins reasoning: the open mark, with a line break if the template has one
    closing: str = ""  # ends reasoning and leads to the answer: "\n</think>\n\n"
    uses_channels: bool = False
    switch: str | None = None  # template variable that enables reasoning
    has_efforts: bool = False  # the template uses reasoning_effort
    ids: Mapping[str, int] = field(default_factory=dict)  # marks that are one token
    controls: Mapping[str, int] = field(default_factory=dict)  # ... that has no text
    opening_ids: tuple[int, ...] = ()
    close_ids: tuple[int, ...] = ()  # of `closing`, up to and with the close mark ...
    after_close_ids: tuple[int, ...] = ()  # ... and the tokens after it, up to the answer

    def template_options(
        self, think: bool | str | None, budget: int | None
    ) -> tuple[dict[str, Any], int | None]:
        """Return template variables and reasoning budget; `think` is a switch or an effort.

        Without reasoning the budget is 0, as not every template has a switch or every model obeys.
        """
        variables: dict[str, Any] = {}
        if think is None:
            return variables, budget
        is_on = think not in (False, "none")
        if self.has_efforts:
            efforts = {True: "medium", False: "low", "none": "low"}
            variables[_EFFORT] = efforts.get(think, think)
        if self.switch is not None:
            variables[self.switch] = is_on
        return variables, budget if is_on else 0

    def start(self, prompt: Sequence[int], text: str) -> OutputStart:
        """Return where the output after a prompt begins.

        `text` is the text of the prompt's last tokens (see `tail_of`), control tokens included.
        """
        if self.uses_channels:
            return self._start_in_channel(prompt, text)
        if self.open in self.ids and self.close in self.ids:
            marks = (self.ids[self.open], self.ids[self.close])
            last_mark = next(
                (at for at in reversed(range(len(prompt))) if prompt[at] in marks), None
            )
            if last_mark is None:
                return OutputStart()
            if prompt[last_mark] == marks[0]:
                return OutputStart("inside")
        open_pos, close_pos = text.rfind(self.open), text.rfind(self.close)
        if close_pos > open_pos and not text[close_pos + len(self.close) :].strip():
            return OutputStart("behind")
        if open_pos > close_pos and not text[open_pos + len(self.open) :].strip():
            return OutputStart("inside")
        return OutputStart()

    def _start_in_channel(self, prompt: Sequence[int], text: str) -> OutputStart:
        message, start = self.ids.get(MESSAGE), self.ids.get(START)
        message_start = next(
            (at for at in reversed(range(len(prompt))) if prompt[at] == start), None
        )
        if message_start is None or message not in prompt[message_start:]:
            return OutputStart(header=text.rpartition(START)[2] if START in text else "")
        is_thought = text.rpartition(CHANNEL)[2].startswith("analysis")
        return OutputStart("inside" if is_thought else "behind")


def prompt_tail(prompt: Sequence[int]) -> Sequence[int]:
    """Return the last tokens of a prompt, whose text `ThoughtFormat.start` needs."""
    return prompt[-_TAIL:]


def reasoning_format(template: str | None, tokenizer: TokenizerLike) -> ReasoningFormat | None:
    """Return the reasoning format of a chat template and vocabulary, None if there is none."""
    source = template or ""
    mark_ids = {mark: ids[0] for mark in _all_marks() if len(ids := _encoded(tokenizer, mark)) == 1}
    controls = {mark: token for mark, token in tokenizer.special_tokens.items() if mark in mark_ids}
    fields: dict[str, Any] = {
        "switch": next((name for name, use in _SWITCHES.items() if re.search(use, source)), None),
        "has_efforts": _EFFORT in source,
        "ids": mark_ids,
        "controls": controls,
    }
    if CHANNEL in source and MESSAGE in source:
        opening = f"{CHANNEL}analysis{MESSAGE}"
        closing = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
        fmt = ReasoningFormat(
            CHANNEL, END, opening=opening, closing=closing, uses_channels=True, **fields
        )
        return _with_ids(fmt, tokenizer)
    marks = next((m for m in _MARKS if m[1] in source), None) or next(
        (m for m in _MARKS if m[0] in mark_ids and m[1] in mark_ids), None
    )
    if marks is None:
        return None
    opening, closing = _render_marks(template, tokenizer, *marks)
    return _with_ids(ReasoningFormat(*marks, opening=opening, closing=closing, **fields), tokenizer)


def _all_marks() -> list[str]:
    return [*(mark for marks in _MARKS for mark in marks[:2]), CHANNEL, MESSAGE, START, END]


def _encoded(tokenizer: TokenizerLike, text: str) -> list[int]:
    return tokenizer.encode(text, specials=True) if text else []


def _with_ids(fmt: ReasoningFormat, tokenizer: TokenizerLike) -> ReasoningFormat:
    end = fmt.closing.index(fmt.close) + len(fmt.close)
    return replace(
        fmt,
        opening_ids=tuple(_encoded(tokenizer, fmt.opening)),
        close_ids=tuple(_encoded(tokenizer, fmt.closing[:end])),
        after_close_ids=tuple(_encoded(tokenizer, fmt.closing[end:])),
    )


# Rendered to find out how a template writes reasoning and answer.
_THOUGHT, _ANSWER = "probe of thoughts", "probe of answers"
_TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT},
]


def _render_marks(
    template: str | None, tokenizer: TokenizerLike, open: str, close: str, head: str
) -> tuple[str, str]:
    """Return how reasoning begins and ends, by default marks if the template writes none."""
    default = (f"{open}{head}", close) if head else (f"{open}\n", f"{close}\n\n")
    if template is None:
        return default
    try:
        text = ChatTemplate(template, tokenizer).render_as_is(_TURNS, add_generation_prompt=False)
    except UnspoolError:
        return default
    prefix, reasoning, suffix = str(text).partition(_THOUGHT)
    between, answer, _ = suffix.partition(_ANSWER)
    if not (reasoning and answer and open in prefix and close in between):
        return default
    return prefix[prefix.rindex(open) :], between
