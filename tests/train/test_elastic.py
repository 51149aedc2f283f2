"""Under torchrun when a process is lost: training goes on from the last checkpoint, or says so."""

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
from unspool.model.checkpoint import load_transformer, open_checkpoint
from unspool.train.new import _shared
from unspool.train.running.elastic import find_restarted_run, job_facts, open_run_everywhere
from unspool.train.running.faults import explain_error
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run, RunError
from unspool.train.settings import NewSettings

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

# What torchrun does, but its processes are forks, which need not import torch again. One of them
# stops answering in the middle of a step.
JOB = """
import os, signal, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
import unspool.cli.train.telling, unspool.train.new
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
        [sys.executable, "-c", JOB, "train", *WORDS, "--shard", "--timeout", "0.25"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        told += line
        if "go on from it" in line:
            break
    assert "is gone or does not answer" in told, told[-3000:]
    assert "the checkpoint of step 8 is whole" in " ".join(told.split())
    (run,) = Run.all("runs")
    assert run.facts["state"] == "failed"
    stopped = _stopped_children(process.pid)
    assert len(stopped) == 1
    os.kill(stopped[0], signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said[-3000:]
    (run,) = Run.all("runs")  # the second life has begun no run of its own
    assert run.state == "done" and run.folder.name == "speeches-d1"
    assert [line["step"] for line in run.log() if "loss" in line] == list(range(1, 13))
    saved = run.resumable()
    assert saved is not None and len(list((saved.folder / "state").glob("*-of-00002.*"))) == 2
    assert _exit_code(["train", *WORDS, "--name", "alone", "--quiet"]) == 0
    alone = Run.open("alone")
    assert losses(run) == pytest.approx(losses(alone), abs=1e-3)
    one, other = (load_transformer(open_checkpoint(each.model)) for each in (run, alone))
    for (name, found), wanted in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(found, wanted, atol=2e-3), name


def _stopped_children(parent: int) -> list[int]:
    until = time.monotonic() + 10
    found: list[int] = []
    while not found and time.monotonic() < until:
        listed = subprocess.run(
            ["ps", "-o", "pid=,stat=", "--ppid", str(parent)], capture_output=True, text=True
        ).stdout.split("\n")
        rows = [line.split() for line in listed if line.strip()]
        found = [int(pid) for pid, state in rows if state.startswith("T")]
    return found


def test_a_step_is_shared_by_any_number_that_divides_it():
    settings = NewSettings(length=32, batch=4, batch_tokens=32 * 24, steps=1)
    shares = {world: _shared(settings, world) for world in (1, 2, 3, 4, 6, 8, 24)}
    rows = {world: (each.batch, often) for world, (each, often) in shares.items()}
    assert rows == {1: (4, 6), 2: (4, 3), 3: (4, 2), 4: (3, 2), 6: (4, 1), 8: (3, 1), 24: (1, 1)}
    with pytest.raises(RunError, match="24 rows, which 5 processes cannot share"):
        _shared(settings, 5)


def test_only_the_same_job_finds_what_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UNSPOOL_RUNS", str(tmp_path))
    asked = NewSettings(data=("a.txt",), steps=3)
    assert job_facts(asked) == {} and find_restarted_run(asked) is None  # without torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # then the torchrun process is the name
    Run.create(tmp_path / "one", "new", **job_facts(asked))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tuesday")
    assert find_restarted_run(asked) is None
    Run.create(tmp_path / "two", "new", **job_facts(asked))
    found = find_restarted_run(asked)
    assert found is not None and found.name == "two"
    assert find_restarted_run(NewSettings(data=("a.txt",), steps=4)) is None
    found.update(state="done")
    assert find_restarted_run(asked) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    found = find_restarted_run(asked)
    assert found is not None and found.name == "one"


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path):
    with pytest.raises(RunError, match="on a disk that all machines share"):
        open_run_everywhere(tmp_path, Parallel.alone("cpu"))


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
    said = str(explain_error(error, run, 7))
    assert said.startswith("another process of this training is gone or does not answer (")
    assert "no checkpoint to go on from" in said
    assert explain_error(RuntimeError("shapes do not fit"), run, 7) is None  # a bug, shown as it is


def test_the_commands_of_the_guides_are_known():
    """What is shown with torchrun: torchrun and the command know every option."""
    import typer.main
    from torch.distributed.run import get_args_parser

    from unspool.cli.main import app_with, with_command

    root: Any = typer.main.get_command(app_with())
    shown = [
        line
        for page in ("scale.md", "train.md")
        for line in (DOCS / page).read_text().replace("\\\n", " ").split("\n")
        if line.startswith("$ torchrun ")
    ]
    assert len(shown) >= 4
    for line in shown:
        asked = get_args_parser().parse_args(shlex.split(line)[2:])
        assert asked.module and asked.training_script == "unspool", line
        _, name, *words = with_command(asked.training_script_args, piped=False)
        command = root.commands["train"].commands[name]
        known = {option for each in command.params for option in each.opts}
        assert all(word in known for word in words if word.startswith("--")), line
