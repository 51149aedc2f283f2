"""Reports to other programs: what they are given, in calls that they take."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unspool.errors import SettingsError
from unspool.train.running.events import (
    Evaluated,
    RunEnded,
    SampleWritten,
    StepLogged,
    combine_listeners,
    reporters,
)
from unspool.train.running.runs import Run

EVENTS = [
    StepLogged(1, 64, 3.5, 1e-3, 0.7, 900.0, 0.1, None, {"reward": 0.5}),
    Evaluated(1, 3.25, 1.5),
    Evaluated(1, 3.25, None),
    SampleWritten(1, "Once", 0, " upon"),
    RunEnded("done", 1),
]
FIGURES = {
    "loss": 3.5, "lr": 1e-3, "grad_norm": 0.7, "tokens": 64, "tokens_per_second": 900.0,
    "reward": 0.5,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "my run", "new", settings={"depth": 2})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers(name: str, run: Run, monkeypatch: pytest.MonkeyPatch):
    """A stand-in with the parameters that wandb 0.31 and trackio 0.43 have."""
    calls: list[tuple[str, Any]] = []
    module = ModuleType(name)

    if name == "wandb":

        def init(
            *, entity: str | None = None, project: str | None = None, id: str | None = None,
            name: str | None = None, config: dict[str, Any] | None = None,
            resume: bool | str | None = None,
        ) -> None:  # fmt: skip
            assert id is not None and not set(id) & set("/\\#?%: ")  # letters that it refuses
            calls.append(("init", (project, name, config, resume)))

        def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            calls.append(("log", (data, step)))

        def finish(exit_code: int | None = None, quiet: bool | None = None) -> None:
            calls.append(("finish", None))
    else:

        def init(  # type: ignore[misc]
            project: str, name: str | None = None, group: str | None = None,
            config: dict[str, Any] | None = None, resume: str = "never",
        ) -> None:  # fmt: skip
            calls.append(("init", (project, name, config, resume)))

        def log(metrics: dict[str, Any], step: int | None = None) -> None:  # type: ignore[misc]
            calls.append(("log", (metrics, step)))

        def finish() -> None:  # type: ignore[misc]
            calls.append(("finish", None))

    module.init, module.log, module.finish = init, log, finish  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    heard: list[Any] = []
    listen = combine_listeners(heard.append, *reporters([name], run))
    for event in EVENTS:
        listen(event)
    assert heard == EVENTS
    assert calls == [
        ("init", ("unspool", "my run", {"depth": 2}, "allow")),
        ("log", (FIGURES, 1)),
        ("log", ({"held_out_loss": 3.25, "bits_per_byte": 1.5}, 1)),
        ("log", ({"held_out_loss": 3.25}, 1)),
        ("finish", None),
    ]


def test_tensorboard(run: Run, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (listen,) = reporters(["tensorboard"], run)
    for event in EVENTS:
        listen(event)
    found = EventAccumulator(str(run.folder / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {*FIGURES, "held_out_loss", "bits_per_byte"}
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(1, 3.5)]
    assert found.Tags()["tensors"] == ["sample/text_summary"]


def test_what_is_not_there_or_not_possible_is_said(run: Run, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match="unknown report 'paper'"):
        reporters(["paper"], run)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SettingsError, match="wandb is not installed: pip install wandb"):
        reporters(["wandb"], run)

    def init(**given: Any) -> None:
        raise RuntimeError("no API key configured\nmore")

    module = ModuleType("trackio")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    with pytest.raises(SettingsError, match=r"cannot report to trackio: no API key configured$"):
        reporters(["trackio"], run)
