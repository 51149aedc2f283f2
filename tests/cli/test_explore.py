"""The explorer's moves, without a screen; and the screen, without a person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helpers.terminal import Terminal
from unspool.cli.explore import KEYS, Explorer, draw_screen


@pytest.fixture
def explorer(words: Any) -> Explorer:
    start, steps = words.begin("The tree is", max_tokens=0, temperature=0)
    list(start.extend(steps))
    return Explorer(words, [start])


def press(explorer: Explorer, *keys: str) -> None:
    for key in keys:
        KEYS[key](explorer)


def test_step_by_step(explorer: Explorer):
    likeliest = explorer.candidates()[0].token
    press(explorer, "right", " ")
    assert explorer.text.tokens[0] == likeliest and explorer.cursor == 2
    press(explorer, "left", "left", "left")
    assert explorer.cursor == 0 and len(explorer.text.steps) == 2, "going back forgets nothing"
    press(explorer, "right")
    assert explorer.cursor == 1 and len(explorer.text.steps) == 2


def test_another_way_leaves_the_old_one_as_a_branch(explorer: Explorer):
    press(explorer, "right", "right", "left", "left", "down", "enter")
    first, second = explorer.branches[1].text, explorer.text.text
    assert second == explorer._candidates[tuple(explorer.text.prompt)][1].text
    assert len(explorer.branches) == 2
    explorer.type(" for sure")
    press(explorer, "r")
    assert explorer.text.text.startswith(second + " for sure")
    assert len(explorer.text.steps) > 1 + len(explorer.lm.tokenizer.encode(" for sure"))
    press(explorer, "tab")
    assert explorer.text.text == first
    press(explorer, "left", "f")
    assert explorer.branch_index == 2 and len(explorer.text.steps) == 1


def screen_of(explorer: Explorer, prompt: str, width: int, height: int) -> str:
    console = Console(width=width, height=height, file=None, force_terminal=False)
    with console.capture() as displayed:
        console.print(draw_screen(explorer, prompt, width, height))
    return displayed.get()


def test_the_screen(explorer: Explorer):
    press(explorer, "right", "right", "left", "down", "enter")
    screen = screen_of(explorer, "The tree is", 80, 24)
    assert "The tree is" + explorer.branches[0].steps[0].text in screen
    assert "▸" in screen and "█" in screen and "branches" in screen


@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (60, 14), (40, 10), (30, 8)])
def test_the_keys_are_on_every_screen(explorer: Explorer, width: int, height: int):
    """However long the text, and however many the branches."""
    for _ in range(4):
        press(explorer, "r", "left", "f", "left", "down", "enter")
    for message in ("", "a mistake was made, and there is a very long sentence about it " * 3):
        explorer.message = message
        screen = screen_of(explorer, "A long prompt.\n" * 30, width, height)
        lines = screen.rstrip("\n").split("\n")
        assert len(lines) <= height and all(len(line) <= width for line in lines), screen
        assert "q" in lines[-1] and "enter" in screen, screen
        assert "▏" in screen and "▸" in screen, "the cursor and the marked candidate"
    if height >= 14:
        assert "q quit" in lines[-1] and "enter choose" in screen


def test_the_keys_in_a_small_terminal(words_folder: Path):
    """In a real terminal, with a prompt longer than the screen."""
    question = "Why do leaves change color in fall? " * 5
    options = ("--chat", "-m", str(words_folder), "-t", "0")
    with Terminal("explore", question, *options, rows=12, columns=40) as screen:
        screen.wait_for("\nq")
        assert screen.display_text.count("\n") < 12 and "enter" in screen.display_text
        screen.type(" t")
        screen.wait_for("your words: ")
        screen.type("of my own\n")
        screen.wait_for("of my own▏")
        screen.type("q")
        assert screen.ended() == 0 and "of my own" in screen.display_text.splitlines()[-1]
