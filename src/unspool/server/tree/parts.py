"""What the model reads besides the text of a branch.

Memory, an author's note and a lorebook are settings of a branch, kept with it and inherited by its
forks. They are not in its text: `decoding/prompt_parts.py` places them whenever the branch is
resumed or scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator

from unspool.decoding.prompt_parts import (
    SCAN_DEPTH,
    AuthorNote,
    DocumentMessage,
    Logic,
    Lorebook,
    LoreEntry,
    PartsDocument,
    PlacedParts,
    PromptParts,
    compile_key,
    is_pattern,
    place_parts,
)
from unspool.engine.generation import Generation
from unspool.errors import ContextError, UnspoolError
from unspool.server.runtime.schema import Strict
from unspool.server.tree.branches import TreeBranch, TreePrompt
from unspool.server.tree.turns import find_turns
from unspool.session import Session
from unspool.text.chat.template import ChatTemplate
from unspool.text.tokenizer.stream import TextStream
from unspool.text.tokenizer.tokenizer import Tokenizer

NAMES = ("memory", "author_note", "lorebook")
_MAX_PART = 200_000  # characters
_MAX_ENTRIES = 2000

PartText = Annotated[str, StringConstraints(max_length=_MAX_PART)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Keys = Annotated[list[Key], Field(max_length=100)]
Depth = Annotated[int, Field(ge=0, le=10_000)]


class AuthorNoteField(Strict):
    """A note near the end of the prompt."""

    text: PartText
    depth: Depth | None = Field(
        None, description="lines above the end (3), in a chat messages above the end (4)"
    )


class LoreEntryField(Strict):
    """A note that enters the prompt when one of its keys occurs in the last lines or messages."""

    text: PartText
    keys: Keys = Field([], description="words, or /regular expressions/ in RE2's syntax")
    secondary_keys: Keys = Field([], description="must occur too; `logic` says how many")
    logic: Logic = "any"
    name: Annotated[str, StringConstraints(max_length=200)] = ""
    enabled: bool = True
    always: bool = Field(False, description="enters without a key too")
    order: int = Field(
        100, ge=-(1 << 31), lt=1 << 31,
        description="higher: preferred within the token budget, and nearer to the end",
    )  # fmt: skip
    depth: Depth | None = Field(
        None, description="as of an author's note; null: at the start, after the memory"
    )
    scan_depth: Depth | None = Field(None, description="null: that of the lorebook")
    whole_words: bool = True

    @field_validator("keys", "secondary_keys")
    @classmethod
    def _check_patterns(cls, keys: list[str]) -> list[str]:
        for key in filter(is_pattern, keys):
            compile_key(key)
        return keys


class LorebookField(Strict):
    """Entries, and how their keys are searched."""

    entries: list[LoreEntryField] = Field([], max_length=_MAX_ENTRIES)
    scan_depth: Depth = Field(SCAN_DEPTH, description="last lines or messages that are searched")
    token_budget: int | None = Field(
        None, ge=0, lt=1 << 31,
        description="most tokens of all entries; null: a quarter of the context",
    )  # fmt: skip


class ContextFields(Strict):
    """What the model reads besides the text; what is left out is that of the branch."""

    memory: PartText | None = Field(None, description="is at the start; in a chat after the "
                                    "system message")  # fmt: skip
    author_note: AuthorNoteField | None = None
    lorebook: LorebookField | None = None

    def part_values(self) -> dict[str, Any]:
        """The parts that are given, as a branch keeps them."""
        values = {name: getattr(self, name) for name in NAMES if name in self.model_fields_set}
        return {
            name: value.model_dump(exclude_defaults=True) if isinstance(value, Strict) else value
            for name, value in values.items()
        }


def prompt_parts(values: Mapping[str, Any]) -> PromptParts:
    """The parts that a branch keeps."""
    note, lorebook = values.get("author_note"), values.get("lorebook") or {}
    entries = tuple(
        LoreEntry(**{**entry, "keys": tuple(entry.get("keys", ())),
                     "secondary_keys": tuple(entry.get("secondary_keys", ()))})
        for entry in lorebook.get("entries", ())
    )  # fmt: skip
    return PromptParts(
        values.get("memory") or "",
        None if note is None else AuthorNote(**note),
        Lorebook(**{**lorebook, "entries": entries}),
    )


def place(
    lm: Session, prompt: TreePrompt, generation: Generation, values: Mapping[str, Any]
) -> PlacedParts:
    """Place the parts in a text. Slow: run it on a thread."""
    if not any(values.get(name) for name in NAMES):
        return PlacedParts()
    texts = [text for _, text in prompt.pieces()]
    stream = TextStream()
    texts += [stream.push(step.bytes) for step in generation.steps]
    messages = None if prompt.messages is None else _messages(lm, prompt, generation)
    first = len(prompt.added) if prompt.messages is None else 0
    document = PartsDocument(texts, first, messages)
    return place_parts(prompt_parts(values), document, lm.tokenizer, lm.context)


def with_parts(
    lm: Session, prompt: TreePrompt, generation: Generation, values: Mapping[str, Any]
) -> Generation:
    """The text as the model reads it. Raises ContextError if that exceeds the context."""
    placement = place(lm, prompt, generation, values)
    if not placement.parts and not generation.request.inserts:
        return generation
    request = replace(generation.request, inserts=placement.inserts)
    length = len(prompt.ids) + len(generation.steps) + request.num_inserted
    if length > lm.context:
        raise ContextError(
            f"text, memory, author's note and lorebook have {length:,} tokens together, "
            f"{request.num_inserted:,} of them not in the text; the model's context holds "
            f"{lm.context:,}",
            num_tokens=length,
            context=lm.context,
        )
    return replace(generation, request=request)


def attach(
    branch: TreeBranch, copy: Generation, lm: Session, values: Mapping[str, Any] | None = None
) -> Generation:
    """A copy of a branch's text as one that the model can resume, with what it reads besides.

    Slow for long texts, and after a restart if there is a grammar: run it on a thread.

    Args:
        values: Settings instead of those of the branch.
    """
    values = branch.extra_settings.values if values is None else values
    if branch.is_detached:
        names = ("guard", "speculate", "think_budget", "regex", "grammar", "choice", "json_schema")
        options = {name: values.get(name) for name in names if values.get(name) is not None}
        options |= {"thoughts": branch.prompt.messages is not None, "adapter": lm.adapter}
        attached = lm.reattach(copy, **options)
    else:
        attached = replace(copy, source=lm)
    return with_parts(lm, branch.prompt, attached, values)


def _messages(lm: Session, prompt: TreePrompt, generation: Generation) -> list[DocumentMessage]:
    """The messages of a chat: those of the prompt, the answers, and the turns between them."""
    header, opening = _header_sizes(lm.tokenizer)
    messages = list[DocumentMessage]()
    for span in prompt.spans:
        if span.content is None:
            messages.append(DocumentMessage(span.role, span.start, (span.end, span.end)))
            continue
        is_first = not messages and span.role != "system"  # the template may add a system message
        start = max(span.start, span.content[0] - header) if is_first else span.start
        messages.append(DocumentMessage(span.role, start, span.content))
    offset = len(prompt.ids)
    answer = messages.pop() if messages and messages[-1].role == "assistant" else None
    begin = offset if answer is None else answer.start
    words = offset
    for turn in find_turns(lm.tokenizer, generation.steps):
        if turn.content is None:
            continue
        first, last = turn.content[0] + offset, turn.content[1] + offset
        messages.append(DocumentMessage("assistant", begin, (words, turn.start + offset)))
        messages.append(DocumentMessage(turn.role, first - header, (first, last)))
        begin, words = turn.end + offset - opening, turn.end + offset
    end = offset + len(generation.steps)
    messages.append(DocumentMessage("assistant", begin, (words, end)))
    return messages


@lru_cache(maxsize=8)
def _header_sizes(tokenizer: Tokenizer) -> tuple[int, int]:
    """Tokens that the template puts before the words of a later message, and before an answer."""
    roles = ("user", "assistant", "user")
    probe = [{"role": role, "content": f"probe {n}"} for n, role in enumerate(roles)]
    try:
        chat = ChatTemplate(tokenizer.chat_template, tokenizer).encode(probe)
    except UnspoolError:  # the template requires other messages
        return 0, 0
    span, opened = chat.spans[-1], chat.generation
    pieces = [tokenizer.token_bytes(token) for token in chat.ids[span.start : span.end]]
    starts = range(len(pieces))
    header = next((n for n in starts if b"probe 2" not in b"".join(pieces[n + 1 :])), 0)
    return header, 0 if opened is None else opened.end - opened.start
