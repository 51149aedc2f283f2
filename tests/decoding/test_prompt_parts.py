"""Memory, author's note and lorebook: which entries enter, and where all parts stand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from helpers.chat_support import CHATML, GEMMA, LLAMA3
from helpers.chat_support import built as built
from unspool.decoding.prompt_parts import (
    AuthorNote,
    DocumentMessage,
    Lorebook,
    LoreEntry,
    PartsDocument,
    PromptParts,
    message_frame,
    place_parts,
    recent_text,
    select_entries,
)
from unspool.engine.request import Insert, insert_tokens
from unspool.errors import SettingsError

STORY = "One morning\nthe cat sat.\nA dog came\nand barked."


@pytest.fixture
def make_tokenizer(built: Any) -> Callable[[str], Any]:
    """A tokenizer with this chat template."""

    def make(source: str) -> Any:
        tokenizer = copy.copy(built[0])
        tokenizer.chat_template = source
        return tokenizer

    return make


def document(text: str = STORY) -> PartsDocument:
    """A token for each character."""
    return PartsDocument(list(text))


def chosen(
    *entries: LoreEntry, text: str = STORY, context: int = 1000, **options: Any
) -> list[str]:
    book = Lorebook(entries, **options)
    indices, _ = select_entries(book, document(text), len, context)
    return [entries[index].text for index, _ in indices]


def test_inserts_stand_before_their_positions():
    inserts = (Insert(0, (7,)), Insert(2, (8, 9)), Insert(3, (5,)))
    assert insert_tokens([1, 2, 3], inserts) == [7, 1, 2, 8, 9, 3, 5]
    assert insert_tokens([1, 2], inserts) == [7, 1, 2, 8, 9]
    assert insert_tokens([1], inserts) == [7, 1]


@pytest.mark.parametrize(
    ("entry", "enters"),
    [
        (LoreEntry("x", ("DOG",)), True),
        (LoreEntry("x", ("do",)), False),
        (LoreEntry("x", ("do",), whole_words=False), True),
        (LoreEntry("x", ("cow", "a dog came")), True),
        (LoreEntry("x", ("/d.g\\b/",)), True),
        (LoreEntry("x", ("/^DOG$/i",)), False),
        (LoreEntry("x", ("morning",)), False),  # not in the last two lines
        (LoreEntry("x", ("morning",), scan_depth=4), True),
        (LoreEntry("x", ("dog",), enabled=False), False),
        (LoreEntry("x"), False),
        (LoreEntry("x", always=True), True),
        (LoreEntry(" ", always=True), False),
        (LoreEntry("x", ("dog",), ("barked", "cow")), True),
        (LoreEntry("x", ("dog",), ("barked", "cow"), "all"), False),
        (LoreEntry("x", ("dog",), ("barked", "cow"), "not_any"), False),
        (LoreEntry("x", ("dog",), ("barked", "cow"), "not_all"), True),
        (LoreEntry("x", ("cat",), ("barked",)), False),
    ],
)
def test_an_entry_enters_when_a_key_occurs_in_the_last_lines(entry, enters):
    assert chosen(entry, scan_depth=2) == (["x"] if enters else [])


def test_scripts_without_spaces_have_no_whole_words():
    assert chosen(LoreEntry("x", ("犬",)), text="昨日犬が来た") == ["x"]


def test_the_budget_prefers_what_is_always_on_and_then_a_high_order():
    entries = [
        LoreEntry("low" * 10, ("dog",), order=1),
        LoreEntry("high" * 10, ("dog",), order=9),
        LoreEntry("always", always=True, order=0),
    ]
    assert chosen(*entries, token_budget=50) == ["always", "high" * 10]
    assert chosen(*entries, token_budget=80) == ["always", "low" * 10, "high" * 10]
    assert chosen(*entries, context=24) == ["always"]  # a quarter of it
    _, left_out = select_entries(Lorebook(tuple(entries), token_budget=50), document(), len, 0)
    assert left_out == [0]


def test_a_pattern_takes_linear_time_and_all_are_bounded():
    assert chosen(LoreEntry("x", ("/(a+)+b/",)), text="a" * 50_000) == []
    many = tuple(f"/(?:x{n}|[a-z]{{90}}){{9}}y/" for n in range(300))
    with pytest.raises(SettingsError, match="take too long together"):
        chosen(LoreEntry("x", many))


@pytest.mark.parametrize(
    ("text", "depth", "expected"),
    [
        (STORY, 0, ""),
        (STORY, 1, "and barked."),
        (STORY, 2, "A dog came\nand barked."),
        (STORY + "\n", 1, "and barked.\n"),
        (STORY, 9, STORY),
        ("", 2, ""),
    ],
)
def test_depth_counts_lines(text, depth, expected):
    assert recent_text(document(text), depth) == expected


def test_parts_are_lines_of_a_text(small_lm):
    tokenizer = small_lm.tokenizer
    ids = tokenizer.encode(STORY)
    texts = [tokenizer.token_bytes(token).decode() for token in ids]
    parts = PromptParts(
        "Anna is a pilot.",
        AuthorNote("[Short.]", 2),
        Lorebook((LoreEntry("Dogs bark.", ("dog",)), LoreEntry("At the end.", ("dog",), depth=1))),
    )
    placement = place_parts(parts, PartsDocument(texts), tokenizer, 1000)
    assert tokenizer.decode(insert_tokens(ids, placement.inserts)) == (
        "Anna is a pilot.\nDogs bark.\nOne morning\nthe cat sat.\n[Short.]\n"
        "A dog came\nAt the end.\nand barked."
    )
    assert [(part.kind, part.matches) for part in placement.parts] == [
        ("memory", ()), ("lore", ("dog",)), ("author_note", ()), ("lore", ("dog",)),
    ]  # fmt: skip
    # Another note leaves what is before it.
    other = place_parts(PromptParts(parts.memory, AuthorNote("[Long.]", 2)), PartsDocument(texts),
                        tokenizer, 1000)  # fmt: skip
    assert other.inserts[0].ids == placement.parts[0].ids
    end = place_parts(PromptParts(note=AuthorNote("Now", 0)), PartsDocument(texts), tokenizer, 10)
    assert tokenizer.decode(insert_tokens(ids, end.inserts)) == STORY + "\nNow\n"


def test_nothing_is_inserted_without_parts(small_lm):
    parts = PromptParts(" ", AuthorNote("\n"), Lorebook((LoreEntry("x", ("cow",)),)))
    assert place_parts(parts, document(), small_lm.tokenizer, 100).inserts == ()


def test_a_template_allows_a_system_message_or_not(make_tokenizer):
    for source, allowed in ((CHATML, True), (LLAMA3, True), (GEMMA, False)):
        assert (message_frame(make_tokenizer(source)) is not None) == allowed


def test_without_system_messages_a_note_starts_the_words_of_the_user(make_tokenizer):
    tokenizer = make_tokenizer(GEMMA)
    messages = [
        DocumentMessage("user", 0, (2, 4)),
        DocumentMessage("assistant", 5, (7, 9)),
        DocumentMessage("user", 10, (12, 14)),
        DocumentMessage("assistant", 15, (17, 17)),
    ]
    document = PartsDocument(["x"] * 17, messages=messages)
    for depth, at in ((0, 12), (1, 12), (2, 12), (3, 2), (9, 2)):
        (part,) = place_parts(
            PromptParts(note=AuthorNote("Note", depth)), document, tokenizer, 1000
        ).parts
        assert part.at == at
        assert tokenizer.decode(part.ids) == "Note\n\n"
