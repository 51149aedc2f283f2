"""The commands as a person gives them: scaling, judge, export, on runs of a few seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from unspool.cli.main import _exit_code
from unspool.errors import UnspoolError
from unspool.model.files.gguf import GGUFFile
from unspool.train.pretrain import NewSettings
from unspool.train.running.runs import Run
from unspool.train.scaling.grid import GridTrainer, held_out_loss, shared_vocabulary
from unspool.train.scaling.study import PlannedRun

WORDS = ("the", "people", "of", "these", "states", "have", "come", "together", "in", "peace")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    lines = (" ".join(rng.choice(WORDS) for _ in range(60)) for _ in range(150))
    path: Path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(".\n\n".join(lines))
    return path


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> GridTrainer:
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSPOOL_CACHE", str(folder / "cache"))
        vocabulary, size = shared_vocabulary([str(text)], folder / "tokenizer", 280)
    assert size == 280
    settings = NewSettings(
        data=(str(text),), held_out=0.1, tokenizer=str(vocabulary), device="cpu", keep=0
    )
    return GridTrainer(settings, size, length=32)


@pytest.fixture(scope="module")
def trained(runs: GridTrainer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of a grid."""
    folder: Path = tmp_path_factory.mktemp("runs") / "d1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSPOOL_CACHE", str(folder.parent / "cache"))
        planned = PlannedRun(1, 1, 8192, 1e9)
        loss = runs(planned, folder)
        run = Run.open(folder)
        assert loss == held_out_loss(run) < 5.5  # less than knowing nothing
        assert runs(planned, folder) == loss  # not trained again
    return run


def test_a_run_of_a_grid_keeps_its_finished_model(trained: Run):
    assert trained.state == "done"
    assert [saved.folder for saved in trained.checkpoints()] == [trained.final]
    assert not any(saved.resumable for saved in trained.checkpoints())


def test_a_run_that_was_stopped_is_told(
    runs: GridTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from unspool.train.running.events import RunEnded

    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "unspool.train.scaling.grid.train", lambda run, on_event: RunEnded("stopped", 3)
    )
    with pytest.raises(UnspoolError, match="rerun the same command to resume"):
        runs(PlannedRun(1, 1, 8192, 1e9), tmp_path / "d1")


def test_judge_on_what_the_run_held_out(trained: Run, capsys: pytest.CaptureFixture[str]):
    assert _exit_code(["train", "judge", str(trained.folder), "--json", "-p", "the people"]) == 0
    result = json.loads(capsys.readouterr().out)["d1"]
    assert len(result["samples"]) == 1
    assert "text" not in result
    assert _exit_code(["train", "judge", str(trained.folder), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["d1"]["text"]
    assert output["documents"] > 1
    logged = [line for line in trained.log() if "held_out_loss" in line][-1]
    # The trainer judges rows that begin in the middle of documents, so only about the same.
    assert output["loss"] == pytest.approx(logged["held_out_loss"], rel=0.1)


def test_judge_on_a_file(
    trained: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "sheet.html"
    words = ["train", "judge", str(trained.folder), "--data", str(text), "--html", str(page)]
    assert _exit_code([*words, "-n", "4"]) == 0
    printed = capsys.readouterr().out
    size = len(text.read_bytes())
    assert f"bits per byte ({size:,} bytes" in printed
    assert "Once upon a time" in page.read_text()
    assert _exit_code(["train", "judge", str(trained.folder), "--data", "nowhere.txt"]) == 2


def test_export(trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What our own tokenizer and shape give is something that GGUF knows."""
    target = tmp_path / "model.gguf"
    assert _exit_code(["train", "export", str(trained.folder), str(target), "-t", "q4_0"]) == 0
    assert GGUFFile(target).metadata["general.architecture"] == "qwen3"
    assert "llama-cli" in capsys.readouterr().out
    assert _exit_code(["train", "export", str(trained.folder), str(target)]) == 2
    assert "--force" in capsys.readouterr().err
    assert _exit_code(["train", "export", str(trained.folder), str(tmp_path / "folder")]) == 0
    assert (tmp_path / "folder" / "model.safetensors").exists()


def test_scaling(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("UNSPOOL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    trained: list[str] = []

    def train(self: GridTrainer, run: PlannedRun, folder: Path) -> float:
        trained.append(folder.name)
        return 1.5 + 20 / run.parameters**0.3 + 60 / run.tokens**0.3

    monkeypatch.setattr(GridTrainer, "__call__", train)
    words = [
        "train", "scaling", str(text), "--budgets", "1e14,3e14,1e15", "--depths", "3,4,5",
        "--check", "3e15", "--vocab-size", "280", "--redraws", "20", "--epochs", "1e9",
        "--aspect", "64", "--fewest", "0.1",
    ]  # fmt: skip
    assert _exit_code(words) == 0
    printed = capsys.readouterr().out
    assert len(trained) == 10
    assert "d3-1e14" in printed
    assert "not part of the fit" in printed
    assert (tmp_path / "runs" / "scaling" / "scaling.svg").exists()
    assert _exit_code([*words, "--json"]) == 0
    assert len(trained) == 10  # all of it was there
    result = json.loads(capsys.readouterr().out)
    assert abs(result["check"]["error"]) < 0.02
    assert _exit_code([*words[:3], "--budgets", "1e12", "--name", "b", "--epochs", "1e9"]) == 2
    assert "a law needs 6" in capsys.readouterr().err
    assert _exit_code([*words[:3], "--budgets", "1e16", "--name", "c"]) == 2
    assert "repeat its text too often" in capsys.readouterr().err
    assert _exit_code([*words[:3], "--depths", "x"]) == 2
    assert "not a comma-separated list" in capsys.readouterr().err
