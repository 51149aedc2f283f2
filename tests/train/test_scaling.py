"""Scaling study: planning, resuming, prediction and plot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest

from helpers import known_law
from unspool.errors import SettingsError, UnspoolError
from unspool.model.config import ModelConfig, Rotary
from unspool.train.learning.model_size import compute_parameters, training_flops
from unspool.train.scaling import study as study_module
from unspool.train.scaling.plot import draw
from unspool.train.scaling.study import PlannedRun, Study, plan

DEPTHS = (2, 3, 4, 6, 8)
BUDGETS = (3e13, 1e14, 3e14)
LENGTH = 128


@pytest.fixture(autouse=True)
def few_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit itself is tested in test_scaling_law.py."""
    monkeypatch.setattr(study_module, "_STARTS", study_module._STARTS[::16])


def config_of(depth: int) -> ModelConfig:
    return ModelConfig(
        family="qwen3", vocab_size=512, width=32 * depth, layers=depth, heads=depth,
        kv_heads=depth, head_width=32, ff_width=96 * depth, context=LENGTH, qk_norm="head",
        rotary=Rotary(width=32), tied=True,
    )  # fmt: skip


def law(run: PlannedRun) -> float:
    return 1.2 + 30.0 / run.parameters**0.3 + 90.0 / run.tokens**0.32


def test_each_run_spends_its_budget():
    grid = plan(config_of, depths=DEPTHS, budgets=BUDGETS, length=LENGTH)
    assert len({run.name for run in grid}) == len(grid) >= 10
    for run in grid:
        config = config_of(run.depth)
        assert run.parameters == compute_parameters(config)
        assert run.tokens * training_flops(config, LENGTH) == pytest.approx(run.flops, rel=1e-3)
        assert 1 <= run.tokens / run.parameters <= 1000
    assert [run.flops for run in grid] == sorted(run.flops for run in grid)
    with pytest.raises(SettingsError, match="tokens per parameter"):
        plan(config_of, depths=[8], budgets=[1e6], length=LENGTH)


def test_a_study_goes_on_predicts_and_is_checked(tmp_path: Path):
    grid = plan(config_of, depths=DEPTHS, budgets=BUDGETS, length=LENGTH)
    trained: list[str] = []

    def train(run: PlannedRun, folder: Path) -> float:
        if len(trained) == 4:
            raise KeyboardInterrupt
        trained.append(folder.name)
        return law(run)

    with pytest.raises(KeyboardInterrupt):
        Study(tmp_path).measure(grid, train)
    study = Study(tmp_path)
    assert len(study.runs) == 4
    again: list[str] = []

    def train_on(run: PlannedRun, folder: Path) -> float:
        again.append(folder.name)
        return law(run)

    study.measure(grid, train_on)
    assert trained + again == [run.name for run in grid]
    study.fit(redraws=10)
    check = study.check(config_of, (6, 8, 10, 12), 3e15, LENGTH, train_on)
    assert abs(check.error) < 0.01
    assert check.measured == law(check.run)
    others = [PlannedRun(d, compute_parameters(config_of(d)), 0, 3e15) for d in (6, 8, 10, 12)]
    assert check.run.depth in {run.depth for run in others}
    largest = [run for run in grid if run.flops == BUDGETS[-1]]
    assert sorted(study.left_out(), key=lambda run: run.depth) == largest
    assert max(map(abs, study.left_out().values())) < 0.01
    opened = Study(tmp_path)
    assert (opened.runs, opened.law, opened.checked) == (study.runs, study.law, study.checked)
    before = len(again)
    assert opened.check(config_of, (6, 8, 10, 12), 3e15, LENGTH, train_on) == check
    assert len(again) == before  # what was trained once is not trained again


def test_runs_side_by_side_are_the_same_runs(tmp_path: Path):
    grid = plan(config_of, depths=DEPTHS, budgets=BUDGETS, length=LENGTH)[:4]
    alone, together = Study(tmp_path / "alone"), Study(tmp_path / "together")
    alone.measure(grid, known_law.train)
    with pytest.raises(ValueError, match=r"no d3-\S+ today"):
        together.measure(grid, known_law.broken, at_once=2)
    assert all(run.depth != 3 for run in together.runs)
    finished: list[PlannedRun] = []
    together.measure(grid, known_law.train, lambda run, loss: finished.append(run), at_once=2)
    assert together.runs == alone.runs
    assert sorted(finished, key=grid.index) == grid
    # A single run that is left over is trained in this process.
    assert len({file.read_text() for file in together.folder.rglob("process")}) > 1


def test_a_run_whose_process_dies_is_told(tmp_path: Path):
    grid = plan(config_of, depths=DEPTHS, budgets=BUDGETS, length=LENGTH)[:2]
    with pytest.raises(UnspoolError, match="exited with 9 before it had a result"):
        Study(tmp_path).measure(grid, known_law.killed, at_once=2)


def test_a_study_that_is_killed_leaves_nobody_behind(tmp_path: Path):
    study = subprocess.Popen([sys.executable, known_law.__file__, str(tmp_path)])
    notes: list[Path] = []
    deadline = time.monotonic() + 60
    while len(notes) < 2 and time.monotonic() < deadline:
        notes = [file for file in tmp_path.rglob("process") if file.read_text()]
        time.sleep(0.05)
    workers = [int(note.read_text()) for note in notes]
    study.kill()
    study.wait()
    assert len(workers) == 2
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline + 60
        time.sleep(0.05)


def test_what_a_study_cannot_do(tmp_path: Path):
    """A check lies beyond the grid, too few runs leave none out, damage is reported."""
    study = Study(tmp_path)
    with pytest.raises(SettingsError, match="fit the law before"):
        study.check(config_of, DEPTHS, 1e15, LENGTH, lambda run, folder: 1.0)
    grid = plan(config_of, depths=DEPTHS, budgets=BUDGETS, length=LENGTH)
    study.measure(grid[:6], known_law.train)
    assert study.left_out() == {}
    study.measure(grid, known_law.train)
    study.fit(redraws=0)
    with pytest.raises(SettingsError, match="must be larger than the grid's largest"):
        study.check(config_of, DEPTHS, 1e14, LENGTH, lambda run, folder: 1.0)
    (tmp_path / "scaling.json").write_text("{")
    with pytest.raises(UnspoolError, match="move it away"):
        Study(tmp_path)


def test_the_picture_is_whole_and_everything_lies_on_it(tmp_path: Path):
    study = Study(tmp_path)
    grid = plan(config_of, depths=DEPTHS, budgets=BUDGETS, length=LENGTH)
    study.measure(grid, lambda run, folder: law(run))
    study.fit(redraws=5)
    study.check(config_of, (6, 8, 10, 12), 3e15, LENGTH, lambda run, folder: law(run))
    picture = draw(study)
    root = Xml.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    dots = root.findall(f"{space}circle")
    assert len([dot for dot in dots if dot.get("class") == "ring"]) == 4  # three, and the legend's
    assert len(dots) >= 3 * len(grid)
    for dot in dots:
        assert 0 < float(dot.get("cx", -1)) < width
        assert 0 < float(dot.get("cy", -1)) < height
    for line in root.findall(f"{space}polyline"):
        for point in (line.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert 0 < x < width
            assert 0 < y < height
    words = " ".join(text.text or "" for text in root.iter(f"{space}text"))
    for expected in ("compute (FLOP)", "parameters", "tokens", "L = 1.2"):
        assert expected in words
    assert "prefers-color-scheme: dark" in picture


def test_real_runs_predict_larger_ones(tmp_path: Path):
    """Twelve runs on enwik8 (docs/research/training.md): the nine smaller ones predict the others,
    and all of them predict a run with three times the compute of the largest."""
    shutil.copy(Path(__file__).parents[2] / "docs/research/data/scaling-enwik8.json", tmp_path)
    (tmp_path / "scaling-enwik8.json").rename(tmp_path / "scaling.json")
    study = Study(tmp_path)
    assert len(study.runs) == 12
    result = study.left_out()
    assert sorted(run.name for run in result) == ["d7-3e16", "d8-3e16", "d9-3e16"]
    assert max(map(abs, result.values())) < 0.01
    fitted = study.fit(redraws=0)
    assert fitted.error < 0.005 and 0.5 < fitted.e < 1.0
    check = json.loads((tmp_path / "scaling.json").read_text())["check"]
    predicted = fitted.loss(check["run"]["parameters"], check["run"]["tokens"])
    assert abs(predicted / check["measured"] - 1) < 0.01
