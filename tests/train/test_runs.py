"""The run folder: written by one process, read and asked by others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unspool.train.running.runs import Run, RunError, milestone_steps


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs" / "speeches", "new", settings={"depth": 4}, steps=100)


def save(run: Run, step: int, *, resumable: bool = False) -> None:
    folder = run.folder / "checkpoints" / f"{step:06}"
    folder.mkdir()
    (folder / "training.json").write_text(json.dumps({"step": step, "tokens": step * 8}))
    if resumable:
        (folder / "state").mkdir()
        (folder / "state" / "state.json").write_text("{}")


def test_a_run_is_found_again_with_what_it_said(run: Run):
    run.update(data={"tokens": 5})
    again = Run.open(run.folder)
    assert again.facts["settings"] == {"depth": 4}
    assert again.facts["data"] == {"tokens": 5}
    assert (again.name, again.state, again.steps) == ("speeches", "running", 100)
    assert [found.folder for found in Run.all(run.folder.parent)] == [run.folder]


def test_a_bare_name_is_looked_for_among_the_runs(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UNSPOOL_RUNS", str(run.folder.parent))
    assert Run.open("speeches").folder == run.folder
    assert Run.free_folder("speeches").name == "speeches-2"
    with pytest.raises(RunError, match="not a training run"):
        Run.open("nowhere")
    with pytest.raises(RunError, match="has a run already"):
        Run.create(run.folder, "new")


def test_a_run_whose_process_is_gone_is_broken_off(run: Run):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    run.update(pid=int(gone.stdout))
    assert run.state == "broken off"
    run.resume_here()
    assert run.state == "running"
    with pytest.raises(RunError, match="already running"):
        run.resume_here()
    run.update(state="done", pid=int(gone.stdout))
    assert run.state == "done"


def test_a_half_written_line_is_no_line_and_lines_are_taken_back(run: Run):
    for step in (1, 2, 3):
        run.write_log({"step": step, "loss": 1 / step, "grad_norm": float("nan")})
    with (run.folder / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in run.log()] == [1, 2, 3]
    assert run.log(since=2) == [{"step": 3, "loss": 1 / 3}]
    run.truncate_logs(2)
    run.write_log({"step": 3, "loss": 0.3})
    assert [line["step"] for line in run.log()] == [1, 2, 3]


def test_asking(run: Run):
    assert run.requested_command() == "go"
    run.send_command("pause")
    assert run.requested_command() == "pause"
    with pytest.raises(RunError, match="pause"):
        run.send_command("dance")
    run.update(state="done")
    with pytest.raises(RunError, match="is done"):
        run.send_command("stop")


def test_checkpoints_in_order_and_the_model_to_write_with(run: Run):
    assert run.model is None
    for step in (0, 30, 3):
        save(run, step, resumable=step == 3)
    (run.folder / "checkpoints" / ".000040.part").mkdir()
    assert [saved.step for saved in run.checkpoints()] == [0, 3, 30]
    assert run.model == run.folder / "checkpoints" / "000030"
    resumable = run.resumable_checkpoint()
    assert resumable is not None and resumable.step == 3
    (run.folder / "final.json").write_text('{"checkpoint": "checkpoints/000003"}')
    assert run.model == run.final == run.folder / "checkpoints" / "000003"


def test_a_damaged_run_says_so(run: Run):
    (run.folder / "run.json").write_text("[1")
    with pytest.raises(RunError, match="damaged"):
        _ = run.facts
    assert Run.all(run.folder.parent) == []


def test_the_film_has_its_steps():
    assert milestone_steps(1000) == (0, 10, 30, 100, 300, 1000)
    assert milestone_steps(3) == (0, 1, 3)


def test_reading_runs_needs_no_torch():
    code = "import sys, unspool.train.running.runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
