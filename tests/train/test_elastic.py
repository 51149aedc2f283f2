"""Jobs of torchrun: steps shared by processes, restarted jobs, lost processes, the guides."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from unspool.train.pretrain import NewSettings, _divide_batch
from unspool.train.running.loop import explain_error
from unspool.train.running.parallel import (
    Parallel,
    find_restarted_run,
    job_facts,
    open_run_everywhere,
)
from unspool.train.running.runs import Run, RunError

DOCS = Path(__file__).parents[2] / "docs"


def test_a_step_is_shared_by_any_number_that_divides_it():
    settings = NewSettings(length=32, batch=4, batch_tokens=32 * 24, steps=1)
    shares = {world: _divide_batch(settings, world) for world in (1, 2, 3, 4, 6, 8, 24)}
    rows = {world: (item.batch, often) for world, (item, often) in shares.items()}
    assert rows == {1: (4, 6), 2: (4, 3), 3: (4, 2), 4: (3, 2), 6: (4, 1), 8: (3, 1), 24: (1, 1)}
    with pytest.raises(RunError, match="24 rows, which 5 processes cannot share"):
        _divide_batch(settings, 5)


def test_only_the_same_job_finds_what_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UNSPOOL_RUNS", str(tmp_path))
    questions = NewSettings(data=("a.txt",), steps=3)
    assert job_facts(questions) == {} and find_restarted_run(questions) is None  # without torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # then the torchrun process is the name
    Run.create(tmp_path / "one", "new", **job_facts(questions))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tuesday")
    assert find_restarted_run(questions) is None
    Run.create(tmp_path / "two", "new", **job_facts(questions))
    result = find_restarted_run(questions)
    assert result is not None and result.name == "two"
    assert find_restarted_run(NewSettings(data=("a.txt",), steps=4)) is None
    result.update(state="done")
    assert find_restarted_run(questions) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    result = find_restarted_run(questions)
    assert result is not None and result.name == "one"


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path):
    with pytest.raises(RunError, match="on a disk that all machines share"):
        open_run_everywhere(tmp_path, Parallel.single_process("cpu"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"),
        RuntimeError("[unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation"),
        torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1"),
    ],
)
def test_a_lost_process_is_told_in_words(error: Exception, tmp_path: Path):
    run = Run.create(tmp_path / "run", "new")
    message = str(explain_error(error, run, 7))
    assert message.startswith("another training process died or does not respond (")
    assert "no checkpoint to resume from" in message
    assert explain_error(RuntimeError("shapes do not fit"), run, 7) is None  # a bug, shown as it is


def test_the_commands_of_the_guides_are_known():
    """What is shown with torchrun: torchrun and the command know every option."""
    import typer.main
    from torch.distributed.run import get_args_parser

    from unspool.cli.main import app_with, with_command

    root: Any = typer.main.get_command(app_with())
    printed = [
        line
        for page in sorted(DOCS.rglob("*.md"))
        for line in page.read_text(encoding="utf-8").replace("\\\n", " ").split("\n")
        if line.startswith("$ torchrun ")
    ]
    assert len(printed) >= 4
    for line in printed:
        questions = get_args_parser().parse_args(shlex.split(line)[2:])
        assert questions.module and questions.training_script == "unspool", line
        _, name, *words = with_command(questions.training_script_args, piped=False)
        command = root.commands["train"].commands[name]
        existing = {option for item in command.params for option in item.opts}
        assert all(word in existing for word in words if word.startswith("--")), line
