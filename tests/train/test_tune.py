"""Fine-tuning a tiny model: it learns, resumes exactly, and the result can be loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool
from helpers import tiny
from unspool.cli.main import _exit_code
from unspool.errors import UnspoolError
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.running.events import Event, StepLogged
from unspool.train.running.runs import Run
from unspool.train.tuning.tasks import Task, accuracy, load_reward_function
from unspool.train.tuning.tune import TuneSettings, new_run, settings_of, tune

ANSWERS = {"red": "stop", "green": "go", "yellow": "wait"}
QUICK = {"batch": 4, "rate": 2e-2, "length": 96, "save_every": 1000, "device": "cpu"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with a vocabulary of bytes, and where prepared data and runs go."""
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UNSPOOL_RUNS", str(tmp_path / "runs"))
    tiny.save("llama", tmp_path / "model")
    settings = TokenizerSettings(vocab_size=259)
    save_tokenizer_files(train_bpe([], settings), settings, tmp_path / "model")
    rows = [{"prompt": p, "completion": c} for p, c in ANSWERS.items()] * 8
    rows = [{**row, "prompt": f"{row['prompt']}{n}"} for n, row in enumerate(rows)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data.jsonl").write_text(lines)
    return tmp_path


def settings(here: Path, **changes: Any) -> TuneSettings:
    given = {"model": str(here / "model"), "data": (str(here / "data.jsonl"),), **QUICK, **changes}
    return TuneSettings(**given)


def logged(events: list[Event]) -> list[StepLogged]:
    return [event for event in events if isinstance(event, StepLogged)]


@pytest.mark.parametrize("lora", [4, 0])
def test_answers_are_learned_and_what_comes_out_writes_them(here: Path, lora: int) -> None:
    events: list[Event] = []
    wanted = settings(here, lora=lora, steps=40, rate=2e-2 if lora else 5e-3)
    run = tune(wanted, new_run(wanted), events.append)
    losses = [event.loss for event in logged(events)]
    assert len(losses) == 40 and np.mean(losses[-5:]) < 0.25 * np.mean(losses[:3])
    assert run.state == "done" and run.final is not None
    lm = unspool.load(run.final, backend="torch")  # an adapter brings its model along
    before = unspool.load(here / "model", backend="torch")
    text = lm.chat_prompt("red9").ids + lm.tokenizer.encode("stop")
    now, then = (sum(model.score(text).logprobs[-4:]) for model in (lm, before))
    assert now > then + 5
    assert (lm.adapter is not None) == bool(lora)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(here: Path) -> None:
    whole = tune(settings(here, lora=4, steps=8), new_run(settings(here, lora=4, steps=8)))
    parts = new_run(settings(here, lora=4, steps=8, save_every=3), here / "runs" / "parts")

    def stop(event: Event) -> None:
        if isinstance(event, StepLogged) and event.step == 3:
            parts.send_command("stop")

    tune(settings_of(parts), parts, stop)
    assert parts.state == "stopped"
    again = Run.open("parts")
    again.resume_here()
    tune(settings_of(again), again)
    files = [run.final / "adapter_model.safetensors" for run in (whole, again) if run.final]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("lora", [4, 0])
def test_dpo_makes_the_chosen_answer_likelier(here: Path, lora: int) -> None:
    rows = [
        {"prompt": f"{p}{n}", "chosen": c, "rejected": "no idea"}
        for n in range(6)
        for p, c in ANSWERS.items()
    ]
    (here / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events: list[Event] = []
    wanted = settings(
        here, kind="dpo", data=(str(here / "pairs.jsonl"),), lora=lora, steps=15,
        rate=1e-2 if lora else 1e-3,
    )  # fmt: skip
    run = tune(wanted, new_run(wanted), events.append)
    told = logged(events)
    assert told[0].loss == pytest.approx(np.log(2), abs=1e-4)  # at first nothing has changed
    assert told[-1].loss < 0.3 and told[-1].extra["margin"] > 1
    assert told[-1].extra["accuracy"] == 1.0
    assert run.facts["kind"] == "dpo"


@pytest.mark.parametrize(("lora", "rate"), [(4, 1e-2), (0, 3e-3)])
def test_grpo_learns_what_its_judge_likes(
    here: Path, monkeypatch: pytest.MonkeyPatch, lora: int, rate: float
) -> None:
    (here / "my_judge.py").write_text(
        "def low(prompt, answer, row):\n"
        "    assert prompt == row['prompt']\n"
        "    return sum(c < 'a' for c in answer) / max(1, len(answer))\n"
    )
    monkeypatch.syspath_prepend(here)
    rows = [{"prompt": f"number {n}"} for n in range(8)]
    (here / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events: list[Event] = []
    wanted = settings(
        here, kind="grpo", data=(str(here / "asked.jsonl"),), judge="my_judge:low", lora=lora,
        steps=12, rate=rate, groups=4, answers=8, max_tokens=8, kl=0.01,
    )  # fmt: skip
    tune(wanted, new_run(wanted), events.append)
    rewards = [event.extra["reward"] for event in logged(events)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
    sys.modules.pop("my_judge", None)


def test_the_commands(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = str(here / "model"), str(here / "data.jsonl")
    from typer.testing import CliRunner

    from unspool.cli.train.tuning import merge
    from unspool.cli.train.tuning import tune as command

    asked = ["--model", model, "--data", data, "--lora", "2", "--steps", "2", "--name", "mine"]
    said = _invoke(CliRunner(), command, [*asked, "--device", "cpu"])
    assert said.exit_code == 0, said.output
    run = Run.open("mine")
    assert run.state == "done" and run.final is not None
    done = _invoke(CliRunner(), merge, [str(run.final), str(here / "merged")])
    assert done.exit_code == 0, done.output
    merged = unspool.load(here / "merged", backend="torch")
    adapted = unspool.load(run.final, backend="torch")
    text = [3, 4, 5, 6, 7]
    one, other = (model.score(text).logprobs[1:] for model in (merged, adapted))
    assert one == pytest.approx(other, abs=1e-4)
    asked = ["run", "hi", "--raw", "-n", "2", "-m", model]
    for adapter in (run.final, run.folder, run.name):
        assert _exit_code([*asked, "--adapter", str(adapter)]) == 0
    judged = [line["step"] for line in run.log() if "held_out_loss" in line]
    assert judged[:1] == [0], "the held-out loss is shown from the start"


def _invoke(runner: Any, command: Any, arguments: list[str]) -> Any:
    import typer

    app = typer.Typer()
    app.command()(command)
    return runner.invoke(app, arguments)


def test_a_run_that_cannot_begin_leaves_nothing(here: Path) -> None:
    wanted = settings(here, data=(str(here / "nowhere.jsonl"),))
    run = new_run(wanted)
    with pytest.raises(UnspoolError, match="nowhere"):
        tune(wanted, run)
    assert not run.folder.exists()


def test_a_task_asks_and_judges() -> None:
    task = Task("family_relationships")
    rows, entries = task.rows(5, seed=1), task.entries(5, seed=1)
    assert [row["completion"] for row in rows] == [entry["answer"] for entry in entries]
    for entry in entries:
        assert task.reward(entry["question"], f" {entry['answer']}\n", entry) == 1.0
        assert task.reward(entry["question"], "a piano", entry) < 1.0
    with pytest.raises(UnspoolError, match="no task"):
        Task("flying")


def test_accuracy_counts_exact_answers() -> None:
    task = Task("family_relationships")
    entries = task.entries(4, seed=2)

    class Knowing:
        def chat(self, asked: list[str], **options: Any) -> Any:
            right = [entry["answer"] for entry in entries]
            return [type("Written", (), {"text": text}) for text in [*right[:3], "nobody"]]

    knowing: Any = Knowing()
    assert accuracy(knowing, entries, task) == 0.75


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": ()}, "--data or --task"),
        ({"kind": "dpo", "data": (), "task": "aiw"}, "pairs"),
        ({"kind": "grpo"}, "judge"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnspoolError, match=said):
        settings(tmp_path, **changes)
    with pytest.raises(UnspoolError, match="module:function"):
        load_reward_function("no_such_module:judge")
