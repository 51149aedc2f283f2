"""Characters of several tokens: whole where their last byte comes, bytes where they are none."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from unspool.cli.explore import Explorer, draw_screen
from unspool.cli.main import _exit_code
from unspool.cli.output import visible
from unspool.text.tokenizer.pieces import incomplete_utf8, readable, readable_pieces

LEAF = "🍁".encode()


def test_a_character_is_shown_by_the_token_that_completes_it():
    assert readable(LEAF[:2]) == "⟨F0 9F⟩"
    assert readable(LEAF[2:], LEAF[:2]) == "🍁"
    assert readable(LEAF[3:] + b"s", LEAF[:3]) == "🍁s"
    assert readable(LEAF[2:3], LEAF[:2]) == "⟨8D⟩"  # not complete yet: its own share
    assert readable(b" the", LEAF[:2]) == " the"  # not a continuation of the partial character
    assert readable(b"\xff\xfea" + LEAF + LEAF[:3]) == "⟨FF FE⟩a🍁⟨F0 9F 8D⟩"
    assert readable(b"") == readable(b"", LEAF[:2]) == ""


@settings(deadline=None)
@given(st.binary(max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_nothing_is_ever_shown_as_a_question_mark(data: bytes, cuts: list[int]):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    output = readable_pieces(pieces)
    assert "\ufffd" not in "".join(output)
    for piece, text in zip(pieces, output, strict=True):
        assert bool(piece) == bool(text)


@settings(deadline=None)
@given(st.text(max_size=6), st.integers(0, 3))
def test_what_a_text_leaves_unfinished(text: str, count: int):
    assert incomplete_utf8(text.encode() + LEAF[:count]) == LEAF[:count]


def test_bytes_stay_as_they_are_where_spaces_are_made_visible():
    assert visible(" a ⟨F0 9F⟩") == "␣a␣⟨F0 9F⟩"


@pytest.mark.real
def test_candidates_are_whole_characters_wherever_a_step_is_told(lm: Any):
    """A grammar makes the model write emoji, independent of its weights."""
    generation = lm.generate("Leaves:", regex="🍁🦜", top=8, explain=True)
    assert generation.text == "🍁🦜"
    assert "".join(step.piece for step in generation.steps if step.text) == "🍁🦜"
    texts = [c.text for step in generation.steps for c in step.candidates]
    assert not any("\ufffd" in text for text in texts)
    last_step = next(step for step in generation.steps if step.text == "🍁")
    assert last_step.partial_utf8 == LEAF[: len(last_step.partial_utf8)] != b""
    for c in last_step.candidates:
        assert c.text == readable(lm.tokenizer.token_bytes(c.token), last_step.partial_utf8)
    at = generation.steps.index(last_step)
    assert [c.text for c in generation.alternatives(at, 8)] == [
        c.text for c in last_step.candidates
    ]
    again = lm.generate("Leaves:", regex="🍁🦜").explained(8)
    assert [[c.text for c in step.candidates] for step in again.steps] == [
        [c.text for c in step.candidates] for step in generation.steps
    ]
    scored = lm.score("Leaves: 🍁", top=4)
    assert scored.positions[-1].text == "🍁"
    assert "\ufffd" not in json.dumps(scored.to_dict(), ensure_ascii=False)


@pytest.mark.real
def test_the_explorer_shows_them(lm: Any):
    start, steps = lm.begin("Leaves:", max_tokens=0, temperature=0)
    list(start.extend(steps))
    explorer = Explorer(lm, [start.choose("🍁")], cursor=2)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(draw_screen(explorer, "Leaves:", 80, 24))
    output = console.export_text()
    assert "🍁" in output and "\ufffd" not in output


@pytest.mark.real
def test_the_terminal_shows_them(default_model: Any, capsys: pytest.CaptureFixture[str]):
    model = ["--model", str(default_model)]
    assert _exit_code(["Leaves:", "--raw", *model, "--regex", "🍁🦜", "--top", "5"]) == 0
    output = capsys.readouterr().out
    assert "🍁" in output and "⟨F0 9F⟩" in output and "\ufffd" not in output
    assert _exit_code(["tokenize", "🍁", "--json", *model]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[-1]["text"] == "🍁" and "⟨" in rows[0]["text"]
