"""Reasoning during generation: budgets, grammars after it, and how texts are split."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers.thought_families import GEMMA, HARMONY, QWEN_OPEN, save_thinker
from unspool.conversation import Conversation
from unspool.errors import SettingsError
from unspool.sampling import Grammar, GrammarSpec

# Control tokens of these vocabularies; a random model would write them anywhere.
NO_MARKS = {token: -50.0 for token in range(9)}
USUAL: dict[str, Any] = {"seed": 3, "max_tokens": 40, "logit_bias": NO_MARKS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = {"tags": QWEN_OPEN, "harmony": HARMONY, "gemma": GEMMA}
    return {name: save_thinker(tmp_path_factory.mktemp(name), kind) for name, kind in kinds.items()}


@pytest.fixture(scope="module")
def thinkers(folders: dict[str, Path]) -> Iterator[dict[str, Any]]:
    models = {name: unspool.load(folder, memory=8 << 20) for name, folder in folders.items()}
    yield models
    for lm in models.values():
        lm.close()


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_closes_the_thought(thinkers: dict[str, Any], budget: int) -> None:
    lm = thinkers["tags"]
    answer = lm.chat("A node?", think_budget=budget, **USUAL)
    format = lm.thought_format
    ends = [*format.close_ids, *format.after_close_ids]
    assert answer.tokens[budget : budget + len(ends)] == ends
    marked = budget + len(ends)
    assert [step.thought for step in answer.steps] == [True] * marked + [False] * (40 - marked)
    assert answer.usage.reasoning_tokens == marked
    assert answer.answer and answer.answer in answer.text and str(answer) == answer.answer
    assert bool(answer.reasoning) == (budget > 0)
    free = lm.chat("A node?", **USUAL)
    assert free.tokens[:budget] == answer.tokens[:budget]  # until then it is the same text
    assert free.answer == "" and free.usage.reasoning_tokens == 40
    again = pickle.loads(pickle.dumps(answer))
    assert (again.reasoning, again.answer) == (answer.reasoning, answer.answer)
    # In two goes, with guesses, and with a guard that takes words back: the same rules.
    first = lm.chat("A node?", think_budget=budget, **{**USUAL, "max_tokens": 5})
    assert first.resume(max_tokens=35).tokens == answer.tokens
    guessed = lm.chat("A node?", think_budget=budget, speculate="lookup", **USUAL)
    assert guessed.tokens == answer.tokens
    banned = answer.steps[-1].piece.strip() or "x"
    guarded = lm.chat("A node?", think_budget=budget, guard=f"ban={banned}", **USUAL)
    assert guarded.tokens[budget : budget + len(ends)] == ends


def test_only_what_closes_a_thought_is_picked_by_hand(thinkers: dict[str, Any]) -> None:
    """All other tokens are picked by the backend, as if there were no budget."""
    lm = thinkers["tags"]
    ends = [*lm.thought_format.close_ids, *lm.thought_format.after_close_ids]
    backend, by_hand, picked = lm.engine.backend, 0, 0
    launch = backend.launch

    def counted(batch: Any) -> Any:
        nonlocal by_hand, picked
        by_hand, picked = by_hand + len(batch.logits_indices), picked + len(batch.sample_indices)
        return launch(batch)

    backend.launch = counted
    try:
        for seed in range(100):  # until no generated word is a tag
            by_hand = picked = 0
            answer = lm.chat("A node?", think_budget=7, seed=seed, max_tokens=14)
            own_tokens = answer.tokens[:7] + answer.tokens[7 + len(ends) :]
            if len(answer.tokens) == 14 and min(own_tokens) >= len(NO_MARKS):
                break
    finally:
        del backend.launch
    assert answer.tokens[7 : 7 + len(ends)] == ends
    assert by_hand == len(ends) + 1  # and the token after them, from the same step
    assert picked == 14 - by_hand


@pytest.mark.parametrize("name", ["tags", "harmony", "gemma"])
def test_a_grammar_is_about_the_answer(thinkers: dict[str, Any], name: str) -> None:
    lm = thinkers[name]
    for think in (True, False):
        options = {"think": think, "think_budget": 5, "regex": "(node|page)"}
        answer = lm.chat("Which?", **options, **USUAL)
        assert answer.answer in ("node", "page") and answer.finish_reason == "stop"
        assert bool(answer.reasoning) == think or name == "gemma"  # which need not think
        assert think or not answer.reasoning
        guessed = lm.chat("Which?", speculate="lookup", **options, **USUAL)
        assert guessed.tokens == answer.tokens


def test_a_trace_holds_the_budget(thinkers: dict[str, Any], tmp_path: Path) -> None:
    lm = thinkers["harmony"]
    answer = lm.chat("Which?", think_budget=4, regex="(node|page)", explain=True, **USUAL)
    answer.save(tmp_path / "trace.json")
    again = lm.replay(tmp_path / "trace.json")
    assert again.difference is None and again.generation.tokens == answer.tokens
    assert again.generation.reasoning == answer.reasoning != ""


def test_asking_what_must_come_changes_nothing(thinkers: dict[str, Any]) -> None:
    lm = thinkers["harmony"]
    spec = GrammarSpec.lark('start: "ab" <[5]> "cd"')
    state = Grammar.compile(spec, lm.grammar_vocabulary).start()
    for letter in "ab":
        state.forced_tokens()
        state.advance(lm.tokenizer.encode(letter)[0])
    assert state.forced_tokens() == [] and state.mask()[5]


def test_a_conversation_leaves_earlier_thoughts_out(thinkers: dict[str, Any]) -> None:
    talk = Conversation(thinkers["tags"])
    for question in ("One?", "Two?"):
        generation, steps = talk.ask(question, think_budget=6, **USUAL)
        for _ in steps:
            pass
        assert generation.reasoning and generation.answer
    first, second = talk.messages[1], talk.messages[3]
    assert first["content"] and first["reasoning_content"]
    prompt = talk.lm.tokenizer.decode(generation.prompt)
    assert first["reasoning_content"] not in prompt  # the template drops it
    assert first["content"].strip()[:4] in prompt and second["reasoning_content"] not in prompt


def test_models_without_thoughts_say_so(lm: Any) -> None:
    assert lm.thought_format is None
    for arguments in ({"think": True}, {"think": "high"}, {"think_budget": 5}):
        with pytest.raises(SettingsError, match="does not reason before it answers"):
            lm.chat("Hi", max_tokens=1, **arguments)
    answer = lm.chat("Hi", max_tokens=3, think=False, temperature=0)
    assert answer.answer == answer.text and answer.reasoning == ""


def test_the_command_line(folders: dict[str, Path], capsys: Any, monkeypatch: Any) -> None:
    import json

    from unspool.cli.main import _exit_code

    arguments = ["run", "A node?", "-m", str(folders["tags"]), "-n", "30", "--seed", "3",
             *[f"--logit-bias={token}=-50" for token in range(9)]]  # fmt: skip
    assert _exit_code([*arguments, "--think-budget", "6", "--regex", "(node|page)"]) == 0
    output = capsys.readouterr()
    assert output.out.strip() in ("node", "page") and "reasoning)" in output.err
    assert _exit_code([*arguments, "-q", "--json", "--think-budget", "6"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("thought", False) for line in lines[:8]] == [True] * 8
    assert lines[-1]["generation"]["reasoning"] and lines[-1]["generation"]["answer"]
    assert _exit_code(arguments) == 0
    output = capsys.readouterr()
    assert output.out == "\n" and "before the answer" in output.err
    assert _exit_code([*arguments, "--no-think", "--effort", "low"]) != 0
    assert "contradict" in capsys.readouterr().err
    assert _exit_code([*arguments, "--raw", "--think"]) != 0
    assert "leave --raw out" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert _exit_code([*arguments, "--think-budget", "6", "--regex", "(node|page)"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("\x1b[2m") and "[thought: 10 tokens" in printed
    assert printed.split("\x1b[0m")[1].strip() in ("node", "page")
