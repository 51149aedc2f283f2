"""torchrun loses a process: training resumes from the last checkpoint, or explains the failure."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_command import SMALL, TEXT, losses

from unspool.cli.main import _exit_code
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
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
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

# What torchrun does, but its processes are forks, which need not import torch again. One of them
# stops answering in the middle of a step.
JOB = """
import os, signal, sys
import safetensors.torch, torch._dynamo
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
import unspool.cli.train.display, unspool.train.pretrain
import unspool.train.running.loop as loop
from torch.distributed.fsdp import fully_shard
from unspool.cli.main import _exit_code

def process(words):
    steps, original = 0, loop.set_rates
    def set_rates(*given):
        nonlocal steps
        steps += 1
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if steps == 9 and os.environ["RANK"] == "1" and first_life:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*given)
    loop.set_rates = set_rates
    if code := _exit_code(words):
        sys.exit(code)

config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="a-job", max_restarts=1,
    rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork", monitor_interval=0.1,
)
elastic_launch(config, process)(sys.argv[1:])
"""
WORDS = ["speeches.txt", *SMALL, "--steps", "12", "--save-every", "4", "--device", "cpu"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "speeches.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("UNSPOOL_RUNS", raising=False)
    return tmp_path


def test_a_process_is_lost_and_nothing_else(place: Path):
    """Two processes, each with a part of the model. One stops answering between two checkpoints:
    the other says so. Then it dies: both are started again, and what comes out is what one
    undisturbed process makes."""
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, "train", *WORDS, "--shard", "--timeout", "0.15"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    output = ""
    for line in process.stderr:
        output += line
        if "resume from it" in line:
            break
    assert "died or does not respond" in output, output[-3000:]
    assert "the checkpoint of step 8 is intact" in " ".join(output.split())
    (run,) = Run.all("runs")
    assert run.facts["state"] == "failed"
    stopped = _stopped_children(process.pid)
    assert len(stopped) == 1
    os.kill(stopped[0], signal.SIGKILL)
    _, message = process.communicate(timeout=200)
    assert process.returncode == 0, message[-3000:]
    (run,) = Run.all("runs")  # the restarted job resumed its run
    assert run.state == "done" and run.folder.name == "speeches-d1"
    assert [line["step"] for line in run.log() if "loss" in line] == list(range(1, 13))
    saved = run.resumable_checkpoint()
    assert saved is not None and len(list((saved.folder / "state").glob("*-of-00002.*"))) == 2
    assert _exit_code(["train", *WORDS, "--name", "alone", "--quiet"]) == 0
    alone = Run.open("alone")
    assert losses(run) == pytest.approx(losses(alone), abs=1e-3)
    first, other = (load_transformer(open_checkpoint(item.model)) for item in (run, alone))
    for (name, result), expected in zip(first.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(result, expected, atol=2e-3), name


def _stopped_children(parent: int) -> list[int]:
    until = time.monotonic() + 10
    result: list[int] = []
    while not result and time.monotonic() < until:
        listed = subprocess.run(
            ["ps", "-o", "pid=,stat=", "--ppid", str(parent)], capture_output=True, text=True
        ).stdout.split("\n")
        rows = [line.split() for line in listed if line.strip()]
        result = [int(pid) for pid, state in rows if state.startswith("T")]
    return result


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
        for page in ("scale.md", "train.md")
        for line in (DOCS / page).read_text().replace("\\\n", " ").split("\n")
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
