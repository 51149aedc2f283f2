"""Parts of a prompt that are not in the text: memory, an author's note, and a lorebook.

    parts = PromptParts("Anna is a pilot.", AuthorNote("Keep it short."), Lorebook(entries))
    placement = place_parts(parts, document, tokenizer, context=2048)
    insert_tokens(tokens, placement.inserts)  # what the model reads

Memory is at the start, and after it the entries of the lorebook that are always on or whose
keys occur in the last lines. The author's note, and entries with a depth, stand a number of lines
above the end; in a chat, a number of messages. So a change of the note leaves what is before it in
the prefix cache. In a chat the start is the end of the system message, or a system message of its
own, and a note is a system message; a template that allows none there gets it at the start of the
next message of the user.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import Literal

from unspool.engine.request import Insert
from unspool.errors import SettingsError, UnspoolError
from unspool.sampling.monitors import LinearPattern, compile_linear
from unspool.text.chat.template import ChatTemplate
from unspool.text.tokenizer.tokenizer import Tokenizer

TEXT_DEPTH, CHAT_DEPTH = 3, 4  # of an author's note: lines as in KoboldAI, messages as SillyTavern
SCAN_DEPTH = 4  # lines or messages that are searched for keys
_BUDGET_SHARE = 4  # a lorebook gets this part of the context
_MOST_SCANNED = 100_000  # characters
_MOST_INSTRUCTIONS = 200_000  # of all patterns of a lorebook: bounds the time of a search

Logic = Literal["any", "all", "not_any", "not_all"]
Kind = Literal["memory", "lore", "author_note"]


@dataclass(frozen=True, slots=True)
class AuthorNote:
    """A note near the end of the text."""

    text: str
    depth: int | None = None  # lines, in a chat messages, after it; None: 3 lines or 4 messages


@dataclass(frozen=True, slots=True)
class LoreEntry:
    """A note that enters the prompt when one of its keys occurs in the last lines."""

    text: str
    keys: tuple[str, ...] = ()  # words, without regard to case; /…/ is a regular expression (RE2)
    secondary_keys: tuple[str, ...] = ()
    logic: Logic = "any"  # how many of the secondary keys must occur besides a key
    name: str = ""
    enabled: bool = True
    always: bool = False  # also without a key
    order: int = 100  # higher: preferred within the budget, and nearer to the end
    depth: int | None = None  # as of an author's note; None: after the memory
    scan_depth: int | None = None  # None: that of the lorebook
    whole_words: bool = True

    @property
    def title(self) -> str:
        return self.name or ", ".join(self.keys[:3]) or self.text[:40]


@dataclass(frozen=True, slots=True)
class Lorebook:
    """Entries, and how many of the last lines or messages are searched for their keys."""

    entries: tuple[LoreEntry, ...] = ()
    scan_depth: int = SCAN_DEPTH
    token_budget: int | None = None  # most tokens of all entries; None: a quarter of the context


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What the model reads besides the text."""

    memory: str = ""
    note: AuthorNote | None = None
    lorebook: Lorebook = field(default_factory=Lorebook)


@dataclass(frozen=True, slots=True)
class DocumentMessage:
    """A message of a chat, as positions of tokens."""

    role: str
    start: int  # its first token, one of the template
    content: tuple[int, int]  # the tokens of its words


@dataclass(frozen=True, slots=True)
class PartsDocument:
    """The text that the parts are placed in."""

    texts: Sequence[str]  # the text of each token
    first: int = 0  # the position after a start token
    messages: Sequence[DocumentMessage] | None = None  # of a chat, in order

    def text(self, first: int, last: int) -> str:
        return "".join(self.texts[first:last])


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A part in the prompt."""

    kind: Kind
    name: str
    text: str
    at: int  # the position of the text before which the model reads it
    ids: tuple[int, ...]
    matches: tuple[str, ...] = ()  # the keys that occur
    index: int | None = None  # of the entry in the lorebook


@dataclass(frozen=True, slots=True)
class PlacedParts:
    """All parts that enter a prompt, in the order in which the model reads them."""

    parts: tuple[PlacedPart, ...] = ()
    left_out: tuple[int, ...] = ()  # entries whose keys occur and that exceed the budget

    @property
    def inserts(self) -> tuple[Insert, ...]:
        """The tokens for `insert_tokens`."""
        inserts = list[Insert]()
        for part in self.parts:
            if inserts and inserts[-1].at == part.at:
                inserts[-1] = Insert(part.at, inserts[-1].ids + part.ids)
            else:
                inserts.append(Insert(part.at, part.ids))
        return tuple(inserts)


def place_parts(
    parts: PromptParts, document: PartsDocument, tokenizer: Tokenizer, context: int
) -> PlacedParts:
    """Choose the entries of the lorebook, and place all parts. Slow for long texts."""
    encode = tokenizer.encode
    lorebook, is_chat = parts.lorebook, document.messages is not None
    entries, left_out = select_entries(lorebook, document, lambda text: len(encode(text)), context)
    depth_of_note = CHAT_DEPTH if is_chat else TEXT_DEPTH
    groups: dict[int | None, list[PlacedPart]] = {None: []}  # by depth; None: the start
    if parts.memory.strip():
        groups[None].append(PlacedPart("memory", "Memory", parts.memory, 0, ()))
    for index, matches in entries:
        entry = lorebook.entries[index]
        part = PlacedPart("lore", entry.title, entry.text, 0, (), matches, index)
        groups.setdefault(entry.depth, []).append(part)
    if parts.note is not None and parts.note.text.strip():
        depth = depth_of_note if parts.note.depth is None else parts.note.depth
        note = PlacedPart("author_note", "Author's note", parts.note.text, 0, ())
        groups.setdefault(depth, []).append(note)
    places = _ChatPlaces(document, tokenizer) if is_chat else _TextPlaces(document, tokenizer)
    placed = list[PlacedPart]()
    for place, group in sorted(groups.items(), key=lambda item: _from_start(item[0])):
        if not group:
            continue
        at, ids = places.encode(place, [part.text for part in group])
        placed += [
            PlacedPart(part.kind, part.name, part.text, at, tuple(tokens), part.matches, part.index)
            for part, tokens in zip(group, ids, strict=True)
        ]
    placed.sort(key=lambda part: part.at)
    return PlacedParts(tuple(placed), tuple(left_out))


def _from_start(depth: int | None) -> tuple[bool, int]:
    """Sort key of depths: the start, and then from the deepest to the end."""
    return depth is not None, -(depth or 0)


# -- the entries that enter


def select_entries(
    lorebook: Lorebook, document: PartsDocument, count: Callable[[str], int], context: int
) -> tuple[list[tuple[int, tuple[str, ...]]], list[int]]:
    """Return (index, keys that occur) of the entries that enter, lowest order first, and the
    indices of those that exceed the token budget. Entries that are always on come first."""
    scans, candidates = dict[int, tuple[str, str]](), list[tuple[int, tuple[str, ...]]]()
    patterns = _Patterns()
    for index, entry in enumerate(lorebook.entries):
        if not entry.enabled or not entry.text.strip():
            continue
        depth = lorebook.scan_depth if entry.scan_depth is None else entry.scan_depth
        if depth not in scans:
            text = recent_text(document, depth)
            scans[depth] = text, text.casefold()
        matches = tuple(k for k in entry.keys if patterns.occurs(k, *scans[depth], entry))
        is_match = bool(matches) and _matches_secondary(entry, scans[depth], patterns)
        if entry.always or is_match:
            candidates.append((index, matches))
    entries = lorebook.entries
    candidates.sort(key=lambda item: (not entries[item[0]].always, -entries[item[0]].order))
    budget = lorebook.token_budget
    remaining = context // _BUDGET_SHARE if budget is None else budget
    chosen, left_out = list[tuple[int, tuple[str, ...]]](), list[int]()
    for index, matches in candidates:
        size = count(entries[index].text)
        if size > remaining:
            left_out.append(index)
            continue
        remaining -= size
        chosen.append((index, matches))
    chosen.sort(key=lambda item: (entries[item[0]].order, item[0]))
    return chosen, left_out


def _matches_secondary(entry: LoreEntry, scan: tuple[str, str], patterns: _Patterns) -> bool:
    if not entry.secondary_keys:
        return True
    occurrences = [patterns.occurs(key, *scan, entry) for key in entry.secondary_keys]
    is_match = any(occurrences) if entry.logic in ("any", "not_any") else all(occurrences)
    return is_match != entry.logic.startswith("not_")


def recent_text(document: PartsDocument, depth: int) -> str:
    """The last lines of a text, or the words of the last messages of a chat."""
    if document.messages is None:
        text = document.text(document.first, len(document.texts))
        return text[_line_start(text, depth) :][-_MOST_SCANNED:]
    words = [document.text(*message.content) for message in document.messages]
    if words and not words[-1]:  # the answer that follows
        words.pop()
    return "\n".join(words[len(words) - min(depth, len(words)) :])[-_MOST_SCANNED:]


def _line_start(text: str, depth: int) -> int:
    """Where the last `depth` lines of a text start; a line break at its end belongs to the last."""
    at = len(text)
    for number in range(depth):
        before = text.rfind("\n", 0, at - 1 if number or text.endswith("\n") else at)
        if before < 0:
            return 0
        at = before + 1
    return at


class _Patterns:
    """The keys of one search. Regular expressions take linear time, and their total is bounded."""

    def __init__(self) -> None:
        self._instructions = 0

    def occurs(self, key: str, text: str, folded: str, entry: LoreEntry) -> bool:
        """Whether a key occurs in a text; `folded` is the same without case."""
        if is_pattern(key):
            pattern = compile_key(key)
            self._instructions += pattern.programsize
            if self._instructions > _MOST_INSTRUCTIONS:
                raise SettingsError(
                    "the regular expressions of the lorebook take too long together; use fewer, or "
                    "plain words"
                )
            return next(pattern.finditer(text, 0), None) is not None
        word = key.strip().casefold()
        at = folded.find(word) if word else -1
        while at >= 0:
            if not entry.whole_words or _is_whole_word(folded, at, at + len(word)):
                return True
            at = folded.find(word, at + 1)
        return False


def is_pattern(key: str) -> bool:
    """Whether a key is a regular expression: between slashes."""
    return len(key) > 2 and key.startswith("/") and key.rstrip("i").endswith("/")


@lru_cache(maxsize=256)
def compile_key(key: str) -> LinearPattern:
    """Compile a key between slashes. Raises SettingsError."""
    return compile_linear(key.rstrip("i")[1:-1], ignore_case=True)


def _is_whole_word(text: str, start: int, end: int) -> bool:
    return not (
        (start and _joins(text[start - 1], text[start]))
        or (end < len(text) and _joins(text[end - 1], text[end]))
    )


def _joins(first: str, second: str) -> bool:
    """Whether two characters are in one word. Scripts without spaces have no words to bound."""
    return all((c.isalnum() or c == "_") and c < "\u2e80" for c in (first, second))


# -- where they stand


class _TextPlaces:
    """Places in a text: lines."""

    def __init__(self, document: PartsDocument, tokenizer: Tokenizer) -> None:
        self._document, self._tokenizer = document, tokenizer

    def encode(self, depth: int | None, texts: Sequence[str]) -> tuple[int, list[list[int]]]:
        """The position of a group of parts, and the tokens of each: lines of their own."""
        document = self._document
        at = document.first
        if depth is not None:
            text = document.text(at, len(document.texts))
            ends = [0, *accumulate(len(piece) for piece in document.texts[at:])]
            at += bisect_left(ends, _line_start(text, depth))  # not within a token
            if at > 0 and at == len(document.texts) and text and not text.endswith("\n"):
                texts = ["\n" + texts[0], *texts[1:]]  # at the end, within a line
        encode = self._tokenizer.encode
        return at, [encode(text if text.endswith("\n") else text + "\n") for text in texts]


@dataclass(frozen=True, slots=True)
class MessageFrame:
    """What a chat template puts around a system message in the middle of a chat."""

    before: tuple[int, ...]
    after: tuple[int, ...]


_PROBE = "probe"


@lru_cache(maxsize=8)
def message_frame(tokenizer: Tokenizer) -> MessageFrame | None:
    """The frame of a system message; None: the template allows none there."""
    messages = [
        {"role": role, "content": words}
        for role, words in (
            ("user", "question"), ("assistant", "answer"), ("system", _PROBE), ("user", "next"),
        )
    ]  # fmt: skip
    try:
        chat = ChatTemplate(tokenizer.chat_template, tokenizer).encode(messages)
    except UnspoolError:
        return None
    if [span.role for span in chat.spans] != [message["role"] for message in messages]:
        return None
    span = chat.spans[2]
    ids = chat.ids[span.start : span.end]
    pieces = [tokenizer.token_bytes(token) for token in ids]
    for first in range(len(ids)):
        for last in range(first + 1, len(ids) + 1):
            if b"".join(pieces[first:last]).lstrip(b" ") == _PROBE.encode():
                return MessageFrame(tuple(ids[:first]), tuple(ids[last:]))
    return None


class _ChatPlaces:
    """Places in a chat: between its messages."""

    def __init__(self, document: PartsDocument, tokenizer: Tokenizer) -> None:
        assert document.messages is not None
        self._messages, self._tokenizer = document.messages, tokenizer
        self._length = len(document.texts)
        template = ChatTemplate(tokenizer.chat_template, tokenizer)
        self._encode = partial(template.encode_inside, at_start=False)

    def encode(self, depth: int | None, texts: Sequence[str]) -> tuple[int, list[list[int]]]:
        """The position of a group of parts, and the tokens of each."""
        messages = self._messages
        first = messages[0] if messages else None
        if depth is None and first is not None and first.role == "system":
            return first.content[1], self._join(texts, before="\n\n")
        is_open = bool(messages) and messages[-1].role == "assistant"
        lowest = 1 if first is not None and first.role == "system" else 0
        number = lowest if depth is None else max(lowest, len(messages) - is_open - depth)
        frame = message_frame(self._tokenizer)
        if frame is not None:
            at = messages[number].start if number < len(messages) else self._length
            ids = self._join(texts, between="\n\n")
            ids[0] = [*frame.before, *ids[0]]
            ids[-1] = [*ids[-1], *frame.after]
            return at, ids
        later = [m for m in messages[number:] if m.role == "user"]
        earlier = [m for m in messages[:number] if m.role == "user"]
        targets = later or earlier[-1:]
        at = targets[0].content[0] if targets else self._length
        return at, self._join(texts, after="\n\n")

    def _join(
        self, texts: Iterable[str], before: str = "", between: str = "", after: str = ""
    ) -> list[list[int]]:
        return [
            self._encode(before + (between if number else "") + text.strip() + after)
            for number, text in enumerate(texts)
        ]
