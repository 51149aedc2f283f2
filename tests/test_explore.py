"""The explorer's moves, without a screen; and the screen, without a person."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from unspool.cli.explore import KEYS, Explorer, view

pytestmark = pytest.mark.real


@pytest.fixture
def explorer(lm: Any) -> Explorer:
    start, steps = lm.begin("The capital of Germany is", max_tokens=0, temperature=0)
    list(start.extend(steps))
    return Explorer(lm, [start])


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
    assert explorer.at == 2 and len(explorer.text.steps) == 1


def test_the_screen(explorer: Explorer):
    press(explorer, "right", "right", "left", "down", "enter")
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as shown:
        console.print(view(explorer, "The capital of Germany is"))
    screen = shown.get()
    assert "The capital of Germany is" + explorer.branches[0].steps[0].text in screen
    assert "▸" in screen and "█" in screen and "branches" in screen
