"""The loop: it learns, it adds up what belongs together, it can be asked, it fails in words."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.tiny_training import Batch, CountingBatches, tiny_model, tiny_trainer
from unspool.errors import SettingsError
from unspool.train.learning.objectives import Loss, next_token
from unspool.train.learning.optimizers import Rates, make_optimizers
from unspool.train.running.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunPaused,
    SampleWritten,
    StepLogged,
    StepsReplanned,
    combine_listeners,
    reporters,
)
from unspool.train.running.loop import Trainer, TrainingError, TrainSettings
from unspool.train.running.runs import Run, RunError, milestone_steps


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def is_equal(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return first.keys() == other.keys() and all(
        torch.equal(first[name], other[name]) for name in first
    )


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_it_learns(kind: Any):
    from unspool.train.learning.model_size import new_model

    model = new_model(tiny_model().config)
    observed: list[Event] = []
    optimizers = make_optimizers(model, Rates(matrices=2e-2, embedding=2e-2), kind)
    settings = TrainSettings(steps=60, warmup=3)
    Trainer(model, CountingBatches(16), next_token, optimizers, settings).run(observed.append)
    losses = [event.loss for event in observed if isinstance(event, StepLogged)]
    assert abs(losses[0] - torch.log(torch.tensor(29.0))) < 0.2  # begins knowing nothing
    assert losses[-1] < 0.6 * losses[0]
    assert observed[-1] == RunEnded("done", 60)


def test_a_step_of_several_batches_is_a_step_of_one_large_one():
    """Rows that count differently many tokens weigh by their tokens, not by their batch."""

    @dataclass
    class Uneven:
        parts: int

        def batch(self, step: int) -> Batch:
            full = CountingBatches(8).batch(step // self.parts)
            loss_mask = torch.zeros(8, 16, dtype=torch.bool)
            for row in range(8):
                loss_mask[row, : 1 + row] = True
            rows = slice(step % self.parts, None, self.parts)
            return Batch(full.ids[rows], loss_mask[rows])

    def trained(parts: int) -> tuple[Trainer, list[float]]:
        model = tiny_model()
        optimizers = make_optimizers(model, Rates(), "adamw")
        settings = TrainSettings(steps=3, accumulate=parts)
        trainer = Trainer(model, Uneven(parts), next_token, optimizers, settings)
        losses: list[float] = []
        trainer.run(lambda e: losses.append(e.loss) if isinstance(e, StepLogged) else None)
        return trainer, losses

    (first, one_losses), (four, four_losses) = trained(1), trained(4)
    assert one_losses == pytest.approx(four_losses, rel=1e-4)
    assert first.tokens == four.tokens == 3 * 8 * 16
    # AdamW divides by the gradient's size, so where that is about zero rounding may decide.
    for name, value in weights(first).items():
        assert (value - weights(four)[name]).abs().mean() < 1e-4, name


def test_gradients_are_clipped():
    lengths: list[float] = []

    def watched(clip: float) -> float:
        trainer = tiny_trainer(steps=1, clip=clip)
        step = trainer.optimizers[0].step

        def measure() -> None:
            gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            lengths.append(float(torch.nn.utils.get_total_norm(gradients)))
            step()

        trainer.optimizers[0].step = measure  # type: ignore[assignment,method-assign]
        events: list[Event] = []
        trainer.run(events.append)
        return next(event.grad_norm for event in events if isinstance(event, StepLogged))

    output = watched(0.0)
    assert lengths[-1] == pytest.approx(output, rel=1e-4)
    assert watched(0.5) == pytest.approx(output, rel=1e-4)
    assert lengths[-1] == pytest.approx(0.5, rel=1e-3)


def test_the_run_tells_what_happened(tmp_path: Path):
    events: list[Event] = []
    trainer = tiny_trainer(
        tmp_path / "run", 20, judge_every=10, sample_every=10,
        evaluate=lambda model: (1.5, 2.5), sampler=lambda model: [("One", 7, " two three")],
    )  # fmt: skip
    trainer.run(events.append)
    run = Run.open(tmp_path / "run")
    assert run.state == "done"
    assert [line["step"] for line in run.log() if "loss" in line] == list(range(1, 21))
    judged = [line for line in run.log() if "held_out_loss" in line]
    assert [(line["step"], line["bits_per_byte"]) for line in judged] == [
        (step, 2.5) for step in (0, 10, 20)
    ]
    assert run.samples()[0] == {"step": 0, "prompt": "One", "seed": 7, "text": " two three"}
    assert [line["step"] for line in run.samples()] == [0, 1, 2, 6, 10, 20]
    kinds = {type(event) for event in events}
    assert kinds == {StepLogged, Evaluated, SampleWritten, CheckpointSaved, RunEnded}
    # The film (0, 1, 3, 10, 30 and 100 % of 20 steps), and the newest two beside it (7, 14).
    assert [saved.step for saved in run.checkpoints()] == [0, 1, 2, 6, 7, 14, 20]
    assert [saved.step for saved in run.checkpoints() if saved.resumable] == [20]
    assert run.final == run.folder / "checkpoints" / "000020"
    assert run.checkpoints()[-1].held_out_loss == 1.5


def test_a_checkpoint_is_the_model(tmp_path: Path):
    from unspool.model.files.checkpoint import load_transformer, open_checkpoint

    trainer = tiny_trainer(tmp_path / "run", 5)
    trainer.run()
    final = Run.open(tmp_path / "run").final
    assert final is not None
    loaded = load_transformer(open_checkpoint(final))
    assert is_equal(loaded.state_dict(), weights(trainer))
    files = [path for path in final.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}


def test_stopped_and_gone_on_with_it_ends_with_the_same_weights(tmp_path: Path):
    full = tiny_trainer(tmp_path / "whole", 10, accumulate=2)
    full.run()
    broken = tiny_trainer(tmp_path / "broken", 10, accumulate=2)
    ended = broken.run(
        lambda event: broken.stop() if isinstance(event, StepLogged) and event.step == 5 else None
    )
    assert ended == RunEnded("stopped", 5)
    assert Run.open(tmp_path / "broken").state == "stopped"
    again = tiny_trainer(tmp_path / "broken", 10, accumulate=2)
    assert again.run() == RunEnded("done", 10)
    assert is_equal(weights(full), weights(again))

    def losses(name: str) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in Run.open(tmp_path / name).log()]

    assert losses("whole") == losses("broken")


def test_asked_to_pause_it_waits_and_goes_on(tmp_path: Path):
    trainer = tiny_trainer(tmp_path / "run")
    run, observed, timers = Run.open(tmp_path / "run"), [], []

    def listen(event: Event) -> None:
        observed.append(event)
        if isinstance(event, StepLogged) and event.step == 3:
            run.send_command("pause")
        if isinstance(event, RunPaused):
            assert run.state == "paused"
            timers.append(threading.Timer(0.1, lambda: run.send_command("go")))
            timers[-1].start()
        if isinstance(event, StepLogged) and event.step == 6:
            run.send_command("stop")

    assert trainer.run(listen) == RunEnded("stopped", 6)
    assert [event.step for event in observed if isinstance(event, RunPaused)] == [3]
    resumable = run.resumable_checkpoint()
    assert resumable is not None and resumable.step == 6


def test_ctrl_c_ends_after_the_step_with_a_checkpoint(tmp_path: Path):
    trainer = tiny_trainer(tmp_path / "run")

    def listen(event: Event) -> None:
        if isinstance(event, StepLogged) and event.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    ended = trainer.run(listen)
    assert ended.state == "stopped" and ended.step in (4, 5)
    assert signal.getsignal(signal.SIGINT) is before
    resumable = Run.open(tmp_path / "run").resumable_checkpoint()
    assert resumable is not None and resumable.step == ended.step


def nan_at(step: int) -> Any:
    count = 0

    def objective(model: Any, batch: Any, rng: Any) -> Loss:
        nonlocal count
        count += 1
        loss = next_token(model, batch, rng)
        return replace(loss, mean=loss.mean * float("nan")) if count > step else loss

    return objective


def broken_trainer(folder: Path | None, objective: Any) -> Trainer:
    trainer = tiny_trainer(folder)
    trainer._computation.objective = objective  # type: ignore[assignment]
    return trainer


def test_a_loss_that_is_no_number_stops_it_before_it_harms(tmp_path: Path):
    trainer = broken_trainer(tmp_path / "run", nan_at(9))
    with pytest.raises(TrainingError, match=r"loss of step 10 is nan.*step 9 is intact.*--resume"):
        trainer.run()
    run = Run.open(tmp_path / "run")
    assert run.state == "failed" and "nan" in run.facts["error"]
    resumable = run.resumable_checkpoint()
    assert resumable is not None and resumable.step == 9
    for value in weights(trainer).values():
        assert torch.isfinite(value).all()
    with pytest.raises(TrainingError, match="there is no checkpoint to resume from"):
        broken_trainer(None, nan_at(0)).run()


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (
            RuntimeError("CUDA error: launch failure\n"),
            TrainingError,
            "the GPU failed at step 1 ",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), TrainingError, "--batch"),
        (OSError(errno.EIO, "Input/output error"), TrainingError, "Input/output error"),
        (KeyError("a bug"), KeyError, "a bug"),  # is shown as one
    ],
)
def test_what_breaks_is_told_in_words(error: Exception, expected: Any, words: str, tmp_path: Path):
    def objective(model: Any, batch: Any, rng: Any) -> Loss:
        raise error

    with pytest.raises(expected, match=words):
        broken_trainer(tmp_path / "run", objective).run()
    run = Run.open(tmp_path / "run")
    resumable = run.resumable_checkpoint()
    assert run.state == "failed" and resumable is not None and resumable.step == 0


def test_a_checkpoint_that_was_being_replaced_is_found_again(tmp_path: Path):
    tiny_trainer(tmp_path / "run", 4).run()
    folder = tmp_path / "run" / "checkpoints"
    (folder / "000004").rename(folder / ".000004.old")
    (folder / ".000003.gone").mkdir()
    assert tiny_trainer(tmp_path / "run", 4).run() == RunEnded("done", 4)
    assert sorted(path.name for path in folder.iterdir())[-1] == "000004"
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    "where", ["unspool.train.running.runs.os.fsync", "safetensors.torch.save_file"]
)
def test_a_full_disk_leaves_the_last_checkpoint_whole(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = tiny_trainer(tmp_path / "run", 10)

    def full(*_: Any, **__: Any) -> None:
        if "fsync" in where:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    def listen(event: Event) -> None:
        if isinstance(event, StepLogged) and event.step == 6:
            monkeypatch.setattr(where, full)

    with pytest.raises(TrainingError, match=r"disk is full.*checkpoint of step 3 is intact"):
        trainer.run(listen)
    monkeypatch.undo()
    remaining = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert remaining == ["000000", "000001", "000003"]
    Run.open(tmp_path / "run").update(state="failed")  # not even that could be written
    assert tiny_trainer(tmp_path / "run", 10).run() == RunEnded("done", 10)


def test_another_model_does_not_go_on_with_the_run(tmp_path: Path):
    tiny_trainer(tmp_path / "run", 3).run()
    run = Run.open(tmp_path / "run")
    model = tiny_model(tied=False)
    optimizers = make_optimizers(model, Rates())
    other = Trainer(model, CountingBatches(), next_token, optimizers, TrainSettings(steps=9), run)
    with pytest.raises(TrainingError, match="another model"):
        other.run()


def scripted_judge(*losses: float) -> Any:
    """An evaluation that gives these held-out losses in turn."""
    remaining = iter(losses)
    return lambda model: (next(remaining), None)


def test_the_best_checkpoint_is_kept_and_is_the_result(tmp_path: Path):
    judge = scripted_judge(5.0, 3.0, 2.0, 4.0, 4.5)
    tiny_trainer(tmp_path / "run", 8, evaluate=judge, judge_every=2, save_every=2, keep=1).run()
    run = Run.open(tmp_path / "run")
    assert run.best_step == 4
    assert run.final == run.model == run.folder / "checkpoints" / "000004"
    assert (run.folder / "checkpoints" / "000008").is_dir()


def test_training_ends_when_the_held_out_loss_stops_improving(tmp_path: Path):
    judge = scripted_judge(5.0, 2.0, 3.0, 2.5, 1.0)
    settings = {"judge_every": 2, "save_every": 2, "patience": 2}
    ended = tiny_trainer(tmp_path / "run", 40, evaluate=judge, **settings).run()
    assert ended == RunEnded("done", 6, early=True)
    run = Run.open(tmp_path / "run")
    assert run.state == "done" and run.best_step == 2


def test_patience_survives_a_stop(tmp_path: Path):
    """The evaluations without a new best are counted over both lives of a run."""
    settings = {"judge_every": 2, "save_every": 2, "patience": 2}
    first = tiny_trainer(tmp_path / "run", 40, evaluate=scripted_judge(5.0, 2.0, 3.0), **settings)
    first.run(lambda event: first.stop() if getattr(event, "step", 0) == 4 else None)
    second = tiny_trainer(tmp_path / "run", 40, evaluate=scripted_judge(2.5), **settings)
    assert second.run() == RunEnded("done", 6, early=True)


def run_by_clock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds_of_step: Callable[[int], float]
) -> tuple[RunEnded, list[Event], float]:
    """Plan 60 steps for 63 seconds; step n takes `seconds_of_step(n)`. Also returns the time."""
    clock = [0.0]
    trainer = tiny_trainer(folder, 60, seconds=63.0, save_every=0)
    take_step = trainer.train_step

    def slow_step() -> Any:
        clock[0] += seconds_of_step(trainer.step)
        return take_step()

    monkeypatch.setattr(trainer, "train_step", slow_step)
    fake_time = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("unspool.train.running.loop.time", fake_time)
    events: list[Event] = []
    return trainer.run(events.append), events, clock[0]


def test_a_slow_machine_gets_fewer_steps_within_the_time_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each step takes a second at first and four later: 60 planned steps no longer fit."""
    ended, events, seconds = run_by_clock(
        tmp_path / "run", monkeypatch, lambda step: 1.0 if step < 20 else 4.0
    )
    assert ended.state == "done" and not ended.early
    assert 57 <= seconds <= 68
    assert ended.step == Run.open(tmp_path / "run").steps < 40
    assert any(isinstance(event, StepsReplanned) for event in events)
    rates = [event.lr for event in events if isinstance(event, StepLogged)]
    assert rates[-1] < 0.1 * max(rates)


def test_without_load_all_planned_steps_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first steps compile."""
    ended, _, _ = run_by_clock(tmp_path / "run", monkeypatch, lambda step: 2.0 if step < 2 else 0.9)
    assert ended.step == 60


# -- The run folder: written by one process, read and asked by others -----------------------------


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


def test_a_run_is_found_again_with_what_it_said(run: Run, monkeypatch: pytest.MonkeyPatch):
    run.update(data={"tokens": 5})
    again = Run.open(run.folder)
    assert again.facts["settings"] == {"depth": 4}
    assert again.facts["data"] == {"tokens": 5}
    assert (again.name, again.state, again.steps) == ("speeches", "running", 100)
    assert [result.folder for result in Run.all(run.folder.parent)] == [run.folder]
    monkeypatch.setenv("UNSPOOL_RUNS", str(run.folder.parent))  # where a bare name is looked for
    assert Run.open("speeches").folder == run.folder
    assert Run.free_folder("speeches").name == "speeches-2"
    with pytest.raises(RunError, match="not a training run"):
        Run.open("nowhere")
    with pytest.raises(RunError, match="has a run already"):
        Run.create(run.folder, "new")


def test_a_run_whose_process_is_gone_is_broken_off(run: Run):
    ended_process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    run.update(pid=int(ended_process.stdout))
    assert run.state == "broken off"
    run.resume_here()
    assert run.state == "running"
    with pytest.raises(RunError, match="already running"):
        run.resume_here()
    run.update(state="done", pid=int(ended_process.stdout))
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
    assert milestone_steps(1000) == (0, 10, 30, 100, 300, 1000) and milestone_steps(3) == (0, 1, 3)
    (run.folder / "run.json").write_text("[1")
    with pytest.raises(RunError, match="damaged"):
        _ = run.facts
    assert Run.all(run.folder.parent) == []


def test_reading_runs_needs_no_torch():
    code = "import sys, unspool.train.running.runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- Reports to other programs: what they are given, in calls that they take ----------------------


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
def reported_run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "my run", "new", settings={"depth": 2})


# The parameters of functions in wandb 0.31 and trackio 0.43, as far as they matter.
TRACKERS = {
    "wandb": {
        "init": ("entity", "project", "id", "name", "config", "resume"),
        "log": ("data", "step", "commit"),
        "finish": ("exit_code", "quiet"),
    },
    "trackio": {
        "init": ("project", "name", "group", "config", "resume"),
        "log": ("metrics", "step"),
        "finish": (),
    },
}


@pytest.mark.parametrize("name", TRACKERS)
def test_trackers(name: str, reported_run: Run, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, Any]] = []
    module = ModuleType(name)
    for function, parameters in TRACKERS[name].items():

        def stand_in(
            *arguments: Any, _function: str = function, _names: tuple[str, ...] = parameters,
            **options: Any,
        ) -> None:  # fmt: skip
            options |= dict(zip(_names, arguments, strict=False))
            assert options.keys() <= set(_names)
            assert not set(options.pop("id", "")) & set("/\\#?%: ")  # letters that wandb refuses
            calls.append((_function, tuple(options.values())))

        setattr(module, function, stand_in)
    monkeypatch.setitem(sys.modules, name, module)
    events_heard: list[Any] = []
    listen = combine_listeners(events_heard.append, *reporters([name], reported_run))
    for event in EVENTS:
        listen(event)
    assert events_heard == EVENTS
    assert calls == [
        ("init", ("unspool", "my run", {"depth": 2}, "allow")),
        ("log", (1, FIGURES)),
        ("log", (1, {"held_out_loss": 3.25, "bits_per_byte": 1.5})),
        ("log", (1, {"held_out_loss": 3.25})),
        ("finish", ()),
    ]


def test_tensorboard(reported_run: Run, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (listen,) = reporters(["tensorboard"], reported_run)
    for event in EVENTS:
        listen(event)
    result = EventAccumulator(str(reported_run.folder / "tensorboard"))
    result.Reload()
    assert set(result.Tags()["scalars"]) == {*FIGURES, "held_out_loss", "bits_per_byte"}
    assert [(item.step, item.value) for item in result.Scalars("loss")] == [(1, 3.5)]
    assert result.Tags()["tensors"] == ["sample/text_summary"]


def test_what_is_not_there_or_not_possible_is_said(
    reported_run: Run, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(SettingsError, match="unknown report 'paper'"):
        reporters(["paper"], reported_run)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SettingsError, match="wandb is not installed: pip install wandb"):
        reporters(["wandb"], reported_run)

    def init(**given: Any) -> None:
        raise RuntimeError("no API key configured\nmore")

    module = ModuleType("trackio")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    with pytest.raises(SettingsError, match=r"cannot report to trackio: no API key configured$"):
        reporters(["trackio"], reported_run)
