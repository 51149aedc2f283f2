"""`unspool think`, on a tiny model: the winner, the search, and what goes wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from unspool.cli.think import TreeView
from unspool.decoding.search.tree import (
    BudgetUsed,
    NodeAdded,
    NodePruned,
    NodeScored,
    SearchEvent,
    SearchFinished,
)

USUAL = ("--seed", "3", "-n", "10", "-o", "n=4", "--budget", "400")


@pytest.fixture
def run(unspool: Any) -> Any:
    return lambda *arguments, stdin="": unspool("think", *arguments, stdin=stdin)


def test_the_winner_goes_to_stdout(run: Any, words: Any):
    expected = words.think(words.chat_prompt("Plan").ids, n=4, budget=400, max_tokens=10, seed=3)
    code, out, err = run("Plan", *USUAL)
    assert code == 0 and out == expected.text + "\n"
    assert f"best of 4 texts, score {expected.score:.4g}" in err and "of 400 tokens" in err
    assert run("Plan", *USUAL, "-q")[1:] == (expected.text + "\n", "")
    raw = words.think("Plan", n=4, budget=400, max_tokens=10, seed=3)
    assert run("--raw", *USUAL, stdin="Plan")[1] == raw.text + "\n"


def test_the_search_as_json(run: Any, tmp_path: Path):
    file = tmp_path / "search.json"
    code, out, _ = run("Plan", *USUAL, "--judge", "regex:e", "--json", "--trace", str(file))
    lines = [json.loads(line) for line in out.splitlines()]
    saved = json.loads(file.read_text())
    assert code == 0 and saved["events"] == lines[:-1] and saved["thought"] == lines[-1]["thought"]
    assert saved["prompt"] == "Plan" and saved["judge"] == "regex:e" and saved["n"] == 4
    grown = [event for event in lines[:-1] if event["event"] == "grown"]
    judged = {e["node"]: e["score"] for e in lines[:-1] if e["event"] == "judged"}
    assert judged == {e["node"]: float("e" in e["text"]) for e in grown}


def test_a_checker_that_fails(run: Any, tmp_path: Path):
    events = map(json.loads, run("Plan", *USUAL, "--json")[1].splitlines())
    texts = [event["text"] for event in events if event.get("event") == "grown"]
    checker = tmp_path / "checker.py"
    checker.write_text(
        "def check(text):\n"
        f"    if text == {texts[0]!r}:\n        raise ValueError('bad')\n    return 1\n"
        "def never(text):\n    return 'nonsense'\n"
    )
    code, out, err = run("Plan", *USUAL, "--judge", f"python:{checker}")
    assert code == 0 and len({*texts}) == 4 and out != texts[0] + "\n"
    assert "the judge failed on 1 texts; the first error: " in err
    code, out, err = run("Plan", *USUAL, "--judge", f"python:{checker}:never")
    assert code == 2 and out == "" and "nonsense" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "magic"], "no policy 'magic'"),
        (["--judge", "magic"], "no judge 'magic'"),
        (["--judge", "logprob:x"], "no judge"),
        (["--judge", "vote+vote"], "weighs votes by votes"),
        (["--judge", "python:absent.py"], "does not exist"),
        (["--budget", "0"], "budget must be"),
        (["--budget", "12"], "budget"),
        (["-o", "m=2"], "no option 'm'"),
        (["-o", "n"], "NAME=VALUE"),
        (["-o", "n=many"], "got 'many'"),
        (["--trace", "absent/x.json"], "no folder"),
        (["--raw", "--system", "x"], "--system"),
    ],
)
def test_mistakes_are_one_line(run: Any, options: list[str], message: str):
    code, out, err = run("Plan", *options)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_ctrl_c_keeps_what_was_seen(
    run: Any, words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: Any) -> None:  # in the middle of judging
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr("unspool.decoding.search.checkers.answers", interrupted)
    file = tmp_path / "search.json"
    code, out, _ = run("Plan", *USUAL, "--judge", "regex:e", "--trace", str(file))
    saved = json.loads(file.read_text())
    assert code == 130 and out == "" and saved["thought"] is None
    assert [event["event"] for event in saved["events"]].count("grown") == 4
    engine = words.engine
    engine.call(engine.tree.index.clear)
    assert engine.call(lambda: engine.tree.pool.used) == 0


# -- the picture -------------------------------------------------------------------------------


def draw(events: list[SearchEvent], height: int) -> str:
    view = TreeView()
    for event in events:
        view.add(event)
    console = Console(width=60, file=io.StringIO(), force_terminal=False)
    console.print(view.draw(60, height))
    return console.file.getvalue()  # type: ignore[attr-defined]


def grown(node: int, parent: int = 0) -> NodeAdded:
    return NodeAdded(node, parent, f"text {node}", (1,), -1.0, finished=node % 2 == 0)


def test_the_tree_as_it_is_drawn():
    events: list[SearchEvent] = [BudgetUsed(10, 20, 5, 100), *map(grown, (1, 2, 3)), grown(4, 1)]
    events += [NodeScored(2, None, "it raised"), NodeScored(3, 0.25), NodeScored(4, 0.75)]
    events.append(NodePruned(3))
    result = draw([*events, SearchFinished(4, 0.75)], 20)
    assert "35 of 100 tokens: 10 prompt, 20 generated, 5 judged" in result
    assert "(failed): it raised" in result and "0.250 'text 3' (pruned)" in result
    assert "0.750 'text 4' (best)" in result and "more" not in result


@pytest.mark.parametrize("height", [3, 6, 12, 30])
def test_a_large_tree_fits_the_screen(height: int):
    events: list[SearchEvent] = [BudgetUsed(10, 20, 5, None)]
    events += [grown(n, (n - 1) // 5) for n in range(1, 60)]
    events += [NodePruned(n) for n in range(1, 60, 3)] + [SearchFinished(58, 1.0)]
    result = draw(events, height).splitlines()
    way = 3  # to node 58: 11 and 2 stand above it
    assert len(result) <= max(height, 2 * way + 2)
    assert any("(best)" in line for line in result)
