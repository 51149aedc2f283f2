"""Twins of a tiny model as runs: what they learn from, what comes out, and going on exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers import tiny
from helpers.tiny_training import CONFIG
from unspool.cli.main import _exit_code
from unspool.errors import UnspoolError
from unspool.model.adapters import CanvasAdapterSettings, read_adapter
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.running.events import Event, StepLogged
from unspool.train.running.loop import Trainer
from unspool.train.running.runs import Run
from unspool.train.twins.settings import TwinSettings
from unspool.train.twins.twin import mask_token, new_run, settings_of, train_twin

QUICK: dict[str, Any] = {
    "chat": 6, "chat_tokens": 20, "batch": 4, "length": 32, "steps": 4, "device": "cpu",
    "judge_every": 100, "save_every": 100,
}  # fmt: skip
CANVAS = {"block": 8, "mask_id": 0, "shifted": True}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model with a vocabulary of bytes, some text, and where prepared data and runs go."""
    folder = tmp_path_factory.mktemp("twins")
    tiny.save("llama", folder / "model")
    settings = TokenizerSettings(vocab_size=259)
    save_tokenizer_files(train_bpe([], settings), settings, folder / "model")
    words = "\n\n".join(f"the {n} people of these states go on {n * n}" for n in range(120))
    (folder / "words.txt").write_text(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSPOOL_CACHE", str(folder / "cache"))
        patch.setenv("UNSPOOL_RUNS", str(folder / "runs"))
        yield folder


def settings(here: Path, kind: str, **changes: Any) -> TwinSettings:
    base = {"model": str(here / "model"), "data": (str(here / "words.txt"),), **QUICK}
    if kind not in ("block", "fill"):
        base = {"depth": 2, "width": 32, "heads": 4, **QUICK}
    return TwinSettings(**{"kind": kind, "mask": 0, **base, **changes})


def trained(expected: TwinSettings) -> tuple[Run, list[float]]:
    events: list[Event] = []
    run = train_twin(expected, new_run(expected), events.append)
    assert run.state == "done" and run.final is not None
    return run, [event.loss for event in events if isinstance(event, StepLogged)]


@pytest.fixture(scope="module")
def block_run(here: Path) -> tuple[Run, list[float]]:
    return trained(settings(here, "block", steps=12, rate=5e-3, chat=0))


def test_a_block_twin_is_a_model_that_says_how_it_looks(
    here: Path, block_run: tuple[Run, list[float]]
):
    run, losses = block_run
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    config = json.loads((run.final / "config.json").read_text())
    assert config["unspool"] == {"sight": "block", **CANVAS}
    assert config["model_type"] == "llama"
    before, after = (
        load_transformer(open_checkpoint(path)).state_dict() for path in (here / "model", run.final)
    )
    table, other = before["embed.weight"], after["embed.weight"]
    assert torch.equal(table[1:], other[1:]) and not torch.equal(table[0], other[0])
    assert torch.equal(before["head.weight"], after["head.weight"])
    layer = "layers.1.attention.q.weight"
    assert not torch.equal(before[layer], after[layer])
    assert json.loads((run.final / "twin.json").read_text())["base"] == str(here / "model")
    assert run.facts["kind"] == "twin" and run.facts["data"]["sources"]


def test_an_adapter_says_how_a_canvas_is_filled(here: Path):
    """It is PEFT's, with a note: mask, block size and shift are read from its twin.json."""
    run, _ = trained(settings(here, "block", lora=2))
    report = json.loads((run.final / "twin.json").read_text())
    assert report.items() >= {"sight": "block", **CANVAS}.items()
    adapter = read_adapter(run.final, open_checkpoint(here / "model").config)
    assert any(np.abs(part.up).max() > 0 for part in adapter.parts.values())
    assert adapter.canvas == CanvasAdapterSettings(mask_id=0, block=8, shifted=True)
    with unspool.load(here / "model", backend="torch") as lm:
        with pytest.raises(UnspoolError, match="no mask token"):
            lm.diffuse([5, 6, 7], max_tokens=16)
        lm.load_adapter("twin", run.final)
        filled = lm.diffuse([5, 6, 7], max_tokens=16, twin="twin", seed=1, end=False)
        named = {"mask": 0, "block": 8, "shifted": True}
        again = lm.diffuse([5, 6, 7], max_tokens=16, twin="twin", seed=1, end=False, **named)
        assert filled.tokens == again.tokens and len(filled.tokens) == 16
        (run.final / "twin.json").write_text('{"mask_id": 10000000, "block": 8}')
        with pytest.raises(UnspoolError, match="mask_id is 10000000"):
            lm.load_adapter("twin", run.final)


def test_a_fill_twin_goes_on_from_a_block_twin(here: Path, block_run: tuple[Run, list[float]]):
    first, _ = block_run
    run, _ = trained(settings(here, "fill", start=str(first.folder), rate=1e-9))
    config = json.loads((run.final / "config.json").read_text())
    assert config["unspool"] == {"sight": "whole", **CANVAS, "block": 0}
    before, after = (
        load_transformer(open_checkpoint(item.final)).state_dict() for item in (first, run)
    )
    assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in before)
    assert len([line for line in run.log() if "shown" in line]) == 4
    with pytest.raises(UnspoolError, match="is not a twin of this model"):
        trained(settings(here, "fill", start=str(here / "model")))


@pytest.mark.parametrize("sight", ["whole", "causal"])
def test_a_puzzle_twin_is_an_ordinary_checkpoint(here: Path, sight: str):
    run, losses = trained(settings(here, "countdown:2", sight=sight, steps=12, batch=16))
    assert losses[-1] < losses[0]
    config = open_checkpoint(run.final).config
    assert config.sight == sight
    assert run.samples()[0]["prompt"].endswith(";")
    if sight == "causal":
        prompt = run.samples()[-1]["prompt"]
        lm = unspool.load(run.final, backend="torch")
        text = lm.generate(prompt, max_tokens=11, temperature=0, end=False).text
        assert text == run.samples()[-1]["text"] or "?" in run.samples()[-1]["text"]


@pytest.mark.parametrize("kind", ["block", "fill", "countdown:2"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(here: Path, kind: str):
    full, _ = trained(settings(here, kind))
    parts = new_run(settings(here, kind))

    def stop(event: Event) -> None:
        if isinstance(event, StepLogged) and event.step == 2:
            parts.send_command("stop")

    train_twin(settings_of(parts), parts, stop)
    assert parts.state == "stopped"
    parts.resume_here()
    train_twin(settings_of(parts), parts)
    assert parts.state == "done" and parts.final and full.final
    files = [run.final / "model.safetensors" for run in (full, parts) if run.final]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_minutes_become_steps_and_the_trial_leaves_no_trace(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    """Trial steps seem to take a twentieth of a second each."""
    monkeypatch.setattr(Trainer, "_fit_time_budget", lambda trainer, elapsed_s: None)
    clock = SimpleNamespace(monotonic=count(0, 0.05).__next__)
    monkeypatch.setattr("unspool.train.twins.twin.time", clock)
    run, _ = trained(settings(here, "countdown:2", steps=None, minutes=0.005, batch=2))
    assert run.steps == 5
    again, _ = trained(settings(here, "countdown:2", steps=5, batch=2))
    files = [(item.final / "model.safetensors").read_bytes() for item in (run, again) if item.final]
    assert files[0] == files[1]


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["train", "twin", "--kind", "countdown:2", "--steps", "3", "--batch", "4",
                 "--depth", "1", "--width", "16", "--heads", "2", "--device", "cpu",
                 "--name", "mine"]  # fmt: skip
    assert _exit_code(arguments) == 0, capsys.readouterr()
    assert Run.open("mine").state == "done"
    report = capsys.readouterr()
    assert "done:" in report.out + report.err
    assert _exit_code(["train", "twin", "--kind", "chess"]) != 0
    assert "unknown kind 'chess'" in capsys.readouterr().err
    assert _exit_code(["train", "twin", "--kind", "sudoku", "--lora", "3"]) != 0


def test_what_cannot_be_is_refused_before_anything_is_made(here: Path):
    before = len(Run.all())
    for wrong in (
        {"kind": "block", "sight": "upwards"},
        {"kind": "block", "steps": 3, "minutes": 1.0},
        {"kind": "block", "start": "runs/x"},
        {"kind": "block", "shares": (0.5, 0.5)},
    ):
        with pytest.raises(UnspoolError):
            TwinSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UnspoolError, match="no unused token for the mask"):
        trained(settings(here, "block", mask=None))
    assert len(Run.all()) == before


def test_the_mask_is_a_token_that_no_text_uses():
    vocabulary: Any = SimpleNamespace(
        bos_id=1, eos_id=2, unk_id=None, pad_id=2, end_ids=frozenset({2}), vocab_size=20,
        chat_template="<|im_start|>",
        special_tokens={"<|im_start|>": 1, "<|im_end|>": 2, "<file>": 7, "<empty>": 16},
    )  # fmt: skip
    assert mask_token(replace(CONFIG, vocab_size=20), vocabulary) == 16
    vocabulary.special_tokens = {"<mask>": 3, "<file>": 7}
    assert mask_token(replace(CONFIG, vocab_size=20), vocabulary) == 3
    vocabulary.special_tokens = {"<|im_end|>": 2}
    assert mask_token(replace(CONFIG, vocab_size=64), vocabulary) == 63
    assert mask_token(replace(CONFIG, vocab_size=64, mask_id=9), vocabulary) == 9
