"""Interrupted batches: no row is lost or duplicated, and the output is the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.batch_support import batch, command, done_rows, read_lines, some_rows, write_rows
from unspool.errors import UnspoolError
from unspool.scale.batch.journal import Journal

ROWS = 40


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = [*some_rows(ROWS - 1), {"prompt": "a", "temperature": -1}]
    return write_rows(tmp_path_factory.mktemp("batch-rows") / "in.jsonl", inputs)


@pytest.fixture(scope="module")
def undisturbed(rows: Path, chatty: Path) -> tuple[bytes, bytes]:
    output = rows.with_name("undisturbed.jsonl")
    assert batch(chatty, rows, output) == 1
    return output.read_bytes(), output.with_name("undisturbed.errors.jsonl").read_bytes()


def read_outputs(output: Path) -> tuple[bytes, bytes]:
    assert not output.with_name(f"{output.name}.unfinished").exists()
    return output.read_bytes(), output.with_name(f"{output.stem}.errors.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole_journal(rows: Path, chatty: Path) -> Path:
    """The folder of a job right before its output is written."""
    output = rows.with_name("halted.jsonl")
    folder = output.with_name("halted.jsonl.unfinished")
    with pytest.MonkeyPatch.context() as patch:

        def halt(journal: Journal) -> None:
            raise UnspoolError("halted")

        patch.setattr("unspool.scale.batch.job.write_output", halt)
        assert batch(chatty, rows, output) == 2
    assert done_rows(output) == ROWS and not output.exists()
    return folder


@pytest.mark.parametrize("case", ["last byte", "anywhere", "a hole"])
def test_cut_off_anywhere(
    case: str, whole_journal: Path, rows: Path, chatty: Path, tmp_path: Path,
    undisturbed: tuple[bytes, bytes],
):  # fmt: skip
    """The output does not depend on where the journal was truncated."""
    output = tmp_path / "out.jsonl"
    folder = shutil.copytree(whole_journal, tmp_path / "out.jsonl.unfinished")
    journal = folder / "answers.jsonl"
    content = journal.read_bytes()
    middle = len(content) // 2
    journal.write_bytes(
        {
            "last byte": content[:-1],
            "anywhere": content[:middle],
            "a hole": content[:middle] + bytes(40) + content[middle + 40 :],  # power was lost
        }[case]
    )
    assert batch(chatty, rows, output) == 1
    assert read_outputs(output) == undisturbed


def test_what_is_done_needs_no_model(
    whole_journal: Path, rows: Path, tmp_path: Path, undisturbed: tuple[bytes, bytes],
    monkeypatch: pytest.MonkeyPatch, chatty: Path,
):  # fmt: skip
    """After a kill during the output, it is written again from the journal alone."""
    output = tmp_path / "out.jsonl"
    shutil.copytree(whole_journal, tmp_path / "out.jsonl.unfinished")
    output.write_text("partial output")
    monkeypatch.setattr("unspool.scale.batch.worker.load", None)
    assert batch(chatty, rows, output) == 1
    assert read_outputs(output) == undisturbed


# A batch whose process is killed as soon as a row is in the journal.
KILLED = """
import os, signal, sys
from unspool.cli.main import _exit_code
from unspool.scale.batch.journal import Journal

record = Journal.record

def record_and_die(journal, outcomes):
    record(journal, outcomes)
    if outcomes:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.record = record_and_die
_exit_code(sys.argv[1:])
"""


def test_killed_interrupted_and_gone_on_with(
    tmp_path: Path, chatty: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    """SIGKILL, Ctrl-C and SIGTERM end it after a few rows each; then the job is completed."""
    inputs = [{"prompt": f"Node {n}", "max_tokens": 16 * n, "end": False} for n in range(1, 13)]
    rows, output = write_rows(tmp_path / "in.jsonl", inputs), tmp_path / "out.jsonl"
    arguments = command(chatty, rows, output, "--threads", "1")
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments]).returncode == -signal.SIGKILL
    done = [done_rows(output)]
    record = Journal.record
    for number in (signal.SIGINT, signal.SIGTERM):

        def record_and_signal(journal: Journal, outcomes: Any, number: int = number) -> None:
            record(journal, outcomes)
            if outcomes:
                os.kill(os.getpid(), number)

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "record", record_and_signal)
            assert batch(chatty, rows, output, "--threads", "1") == 128 + number
        done.append(done_rows(output))
        stderr = capsys.readouterr().err
        assert f"stopped: {done[-1]} of 12 rows are done" in stderr
        assert stderr.count("the same command") == 1 and "Traceback" not in stderr
    assert 0 < done[0] < done[1] < done[2] < 12
    lines = read_lines(tmp_path / "out.jsonl.unfinished" / "answers.jsonl")
    assert len({line["row"] for line in lines}) == done[2]
    # Complete the job from the journal.
    assert batch(chatty, rows, output) == 0
    assert "resuming" in capsys.readouterr().err
    answers = read_lines(output)
    assert [answer["id"] for answer in answers] == list(range(1, 13))
    assert [line["answer"] for line in lines] == [answers[line["row"] - 1] for line in lines]


def test_another_command_is_refused(
    whole_journal: Path, rows: Path, chatty: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], undisturbed: tuple[bytes, bytes],
):  # fmt: skip
    output = tmp_path / "out.jsonl"
    folder = shutil.copytree(whole_journal, tmp_path / "out.jsonl.unfinished")
    other = write_rows(tmp_path / "other.jsonl", some_rows(3))
    for message, arguments in {
        "temperature None (now 0.3)": (rows, "--temperature", "0.3"),
        "seed 7 (now 8)": (rows, "--seed", "8"),
        "different input content": (other,),
        "kv_bits None (now 8)": (rows, "--kv-bits", "8"),
    }.items():
        assert batch(chatty, arguments[0], output, *map(str, arguments[1:])) == 2
        stderr = capsys.readouterr().err
        assert message in stderr and "--restart" in stderr
        assert done_rows(output) == ROWS
    job = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**job, "model": "another"}))
    (folder / "answers.jsonl").write_bytes(b"")
    assert batch(chatty, rows, output) == 2
    assert "other weights" in capsys.readouterr().err
    assert batch(chatty, rows, output, "--restart") == 1
    assert read_outputs(output) == undisturbed


def test_a_random_seed_is_kept(tmp_path: Path, chatty: Path):
    """A command without a seed resumes with the seed of the first run."""
    from unspool.cli.main import _exit_code

    rows, output = write_rows(tmp_path / "in.jsonl", some_rows(4)), tmp_path / "out.jsonl"
    arguments = ["batch", str(rows), str(output), "-m", str(chatty), "-n", "8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unspool.scale.batch.job.write_output", lambda journal: None)
        assert _exit_code(arguments) == 0
    journal = tmp_path / "out.jsonl.unfinished" / "answers.jsonl"
    content = journal.read_bytes()
    journal.write_bytes(content.splitlines(keepends=True)[0])
    assert _exit_code(arguments) == 0
    texts = {line["row"]: line["answer"] for line in map(json.loads, content.splitlines())}
    assert read_lines(output) == [texts[number] for number in sorted(texts)]


def test_two_at_once_are_refused(tmp_path: Path, chatty: Path, capsys: pytest.CaptureFixture[str]):
    rows, output = write_rows(tmp_path / "in.jsonl", some_rows(2)), tmp_path / "out.jsonl"
    with Journal(output):
        assert batch(chatty, rows, output) == 2
    assert "another unspool batch is writing" in capsys.readouterr().err
    assert batch(chatty, rows, output) == 0


def test_a_full_disk_is_told(
    tmp_path: Path, chatty: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    rows, output = write_rows(tmp_path / "in.jsonl", some_rows(2)), tmp_path / "out.jsonl"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "record", full)
        assert batch(chatty, rows, output) == 2
    stderr = capsys.readouterr().err
    assert "No space left" in stderr and "the same command" in stderr
    assert batch(chatty, rows, output) == 0
