"""The messages in the generated part of a chat: which steps the chat template added, and which are
the words of a message. Found in the tokens themselves, so that a branch stores nothing for it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from unspool.engine.results import Step
from unspool.errors import UnspoolError
from unspool.server.tree.branches import MessageSpan
from unspool.text.chat.template import ChatTemplate
from unspool.text.tokenizer.tokenizer import Tokenizer

_ROLES = ("user", "system", "tool")
_PROBE = "probe"
_CONTROL_TEXT = 0xF0000  # control tokens as private characters: no text has them


@dataclass(frozen=True, slots=True)
class TurnFrame:
    """What the template adds around a message that follows an answer."""

    role: str
    before: str
    after: str


@lru_cache(maxsize=8)
def turn_frames(tokenizer: Tokenizer) -> tuple[TurnFrame, ...]:
    """The frames of all roles; control tokens are private characters in them."""
    template = ChatTemplate(tokenizer.chat_template, tokenizer)
    frames = dict[tuple[str, str], TurnFrame]()
    for role in _ROLES:
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "answer"},
            {"role": role, "content": _PROBE},
        ]
        try:
            ids = template.encode_suffix(messages, 1)
        except UnspoolError:  # the template has no such role here
            continue
        text = "".join(_marked(tokenizer, token) for token in ids or ())
        before, probe, after = text.partition(_PROBE)
        if ids and ids[0] in tokenizer.end_ids:  # the answer may have written it
            before = before[1:]
        if probe and before and after:
            frames.setdefault((before, after), TurnFrame(role, before, after))
    return tuple(frames.values())


def find_turns(tokenizer: Tokenizer, steps: Sequence[Step]) -> list[MessageSpan]:
    """The messages that were appended after answers, as indices of steps, in order."""
    pieces = [_marked(tokenizer, step.token) for step in steps]
    text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
    turns, at = list[MessageSpan](), 0
    frames = turn_frames(tokenizer)
    while True:
        places = [(text.find(frame.before, at), frame) for frame in frames]
        start, frame = min(
            ((place, frame) for place, frame in places if place >= 0),
            key=lambda pair: pair[0],
            default=(-1, None),
        )
        if frame is None:
            return turns
        begin = start + len(frame.before)
        end = text.find(frame.after, begin)
        if end < 0:
            return turns
        first = bisect_right(ends, start)
        if not steps[first].chosen:  # the model wrote the same
            at = start + 1
            continue
        if first and steps[first - 1].token in tokenizer.end_ids:
            first -= 1
        last = bisect_left(ends, end + len(frame.after)) + 1
        content = bisect_right(ends, begin), bisect_left(ends, end) + 1
        if end == begin:  # nothing, between these steps
            content = content[0], content[0]
        turns.append(MessageSpan(frame.role, first, last, content))
        at = end + len(frame.after)


def _marked(tokenizer: Tokenizer, token: int) -> str:
    """A token as text of as many characters as it has bytes; a control token is one character."""
    if token in tokenizer.special_ids:
        return chr(_CONTROL_TEXT + token)
    return tokenizer.token_bytes(token).decode("latin-1") if token < len(tokenizer) else ""
