"""Twins of a tiny model as runs: what they learn from, what comes out, and going on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers import tiny
from unspool.cli.main import _exit_code
from unspool.decoding.speculative.head import SHIPPED
from unspool.errors import UnspoolError
from unspool.model.adapters import CanvasAdapterSettings, read_adapter
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.running.events import Event, StepLogged
from unspool.train.running.loop import Trainer
from unspool.train.running.runs import Run
from unspool.train.twins.draft_head import DraftHead, open_head
from unspool.train.twins.settings import TwinSettings
from unspool.train.twins.twin import mask_token, new_run, settings_of, train_twin

QUICK: dict[str, Any] = {
    "chat": 6, "chat_tokens": 20, "batch": 4, "length": 32, "steps": 4, "device": "cpu",
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with a vocabulary of bytes, some text, and where prepared data and runs go."""
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UNSPOOL_RUNS", str(tmp_path / "runs"))
    tiny.save("llama", tmp_path / "model")
    settings = TokenizerSettings(vocab_size=259)
    save_tokenizer_files(train_bpe([], settings), settings, tmp_path / "model")
    words = "\n\n".join(f"the {n} people of these states go on {n * n}" for n in range(120))
    (tmp_path / "words.txt").write_text(words)
    return tmp_path


def settings(here: Path, kind: str, **changes: Any) -> TwinSettings:
    given = {"model": str(here / "model"), "data": (str(here / "words.txt"),), **QUICK}
    if kind not in ("block", "fill", "draft"):
        given = {"depth": 2, "width": 32, "heads": 4, **QUICK}
    return TwinSettings(**{"kind": kind, "mask": 0, **given, **changes})


def trained(wanted: TwinSettings) -> tuple[Run, list[float]]:
    events: list[Event] = []
    run = train_twin(wanted, new_run(wanted), events.append)
    assert run.state == "done" and run.final is not None
    return run, [event.loss for event in events if isinstance(event, StepLogged)]


def test_a_block_twin_is_a_model_that_says_how_it_looks(here: Path):
    run, losses = trained(settings(here, "block", steps=16, rate=5e-3, chat=0))
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    said = json.loads((run.final / "config.json").read_text())
    assert said["unspool"] == {"sight": "block", "block": 8, "mask_id": 0, "shifted": True}
    assert said["model_type"] == "llama"
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


def test_as_an_adapter_it_is_peft_with_a_note(here: Path):
    run, _ = trained(settings(here, "block", lora=2))
    told = json.loads((run.final / "twin.json").read_text())
    assert {k: told[k] for k in ("sight", "block", "mask_id", "shifted")} == {
        "sight": "block", "block": 8, "mask_id": 0, "shifted": True
    }  # fmt: skip
    adapter = read_adapter(run.final, open_checkpoint(here / "model").config)
    assert any(np.abs(part.up).max() > 0 for part in adapter.parts.values())
    assert adapter.canvas == CanvasAdapterSettings(mask_id=0, block=8, shifted=True)


def test_a_canvas_is_filled_as_the_twin_says(here: Path):
    """Mask, block size and shift are read from the adapter's twin.json."""
    run, _ = trained(settings(here, "block", lora=2, chat=0))
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


def test_a_fill_twin_goes_on_from_a_block_twin(here: Path):
    first, _ = trained(settings(here, "block", chat=0))
    run, _ = trained(settings(here, "fill", start=str(first.folder), rate=1e-9))
    said = json.loads((run.final / "config.json").read_text())["unspool"]
    assert said == {"sight": "whole", "block": 0, "mask_id": 0, "shifted": True}
    one, other = (
        load_transformer(open_checkpoint(path.final)).state_dict() for path in (first, run)
    )
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)
    log = [line for line in run.log() if "shown" in line]
    assert len(log) == 4
    with pytest.raises(UnspoolError, match="is not a twin of this model"):
        trained(settings(here, "fill", start=str(here / "model")))


def test_a_drafting_head_learns_and_is_saved(here: Path):
    wanted = settings(here, "draft", draft_tokens=64, steps=14, draft_steps=3, chat_share=1.0)
    run, losses = trained(wanted)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    told = json.loads((run.final / "config.json").read_text())
    assert told["format"] == "unspool-draft-head" and told["layers"] == [0, 1, 3]
    with unspool.load(here / "model", backend="torch") as lm:
        assert told["fingerprint"] == lm.model.fingerprint()
    shape, weights = open_head(run.final)
    assert shape.tokens == 64 and weights["ids"].shape == (64,)
    config = open_checkpoint(here / "model").config
    DraftHead(config, shape, weights["ids"]).load_state_dict(weights)  # all of them, as they were


def test_a_drafting_head_goes_on_from_a_run_or_a_folder(here: Path):
    first, losses = trained(settings(here, "draft", steps=12, rate=0.01))
    assert first.final is not None
    for start in (str(first.folder), str(first.final)):
        again, later = trained(settings(here, "draft", start=start, steps=1, rate=1e-6))
        assert later[0] < losses[0] - 0.05
        assert again.final is not None
        kept = open_head(first.final)[1]
        for name, value in open_head(again.final)[1].items():
            torch.testing.assert_close(value, kept[name], rtol=0.01, atol=0.002)


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


@pytest.mark.parametrize(
    "kind",
    ["block", pytest.param("fill", marks=pytest.mark.slow), "draft",
     pytest.param("countdown:2", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_run_that_was_stopped_goes_on_bit_for_bit(here: Path, kind: str):
    whole, _ = trained(settings(here, kind))
    parts = new_run(settings(here, kind, save_every=2), here / "runs" / "parts")

    def stop(event: Event) -> None:
        if isinstance(event, StepLogged) and event.step == 2:
            parts.send_command("stop")

    train_twin(settings_of(parts), parts, stop)
    assert parts.state == "stopped"
    parts.resume_here()
    train_twin(settings_of(parts), parts)
    assert parts.state == "done" and parts.final and whole.final
    name = "head.safetensors" if kind == "draft" else "model.safetensors"
    assert (whole.final / name).read_bytes() == (parts.final / name).read_bytes()


def test_minutes_become_steps_and_the_trial_leaves_no_trace(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Trainer, "_fit_time_budget", lambda trainer, elapsed_s: None)
    run, _ = trained(settings(here, "countdown:2", steps=None, minutes=0.005, batch=2))
    assert 1 <= run.steps < 500
    again, _ = trained(settings(here, "countdown:2", steps=run.steps, batch=2))
    files = [(each.final / "model.safetensors").read_bytes() for each in (run, again) if each.final]
    assert files[0] == files[1]


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]):
    asked = ["train", "twin", "--kind", "countdown:2", "--steps", "3", "--batch", "4", "--depth",
             "1", "--width", "16", "--heads", "2", "--device", "cpu", "--name", "mine"]  # fmt: skip
    assert _exit_code(asked) == 0, capsys.readouterr()
    assert Run.open("mine").state == "done"
    told = capsys.readouterr()
    assert "done:" in told.out + told.err
    assert _exit_code(["train", "twin", "--kind", "chess"]) != 0
    assert "unknown kind 'chess'" in capsys.readouterr().err
    assert _exit_code(["train", "twin", "--kind", "draft", "--lora", "3"]) != 0


def test_what_cannot_be_is_refused_before_anything_is_made(here: Path):
    for wrong in (
        {"kind": "block", "sight": "upwards"},
        {"kind": "block", "steps": 3, "minutes": 1.0},
        {"kind": "block", "start": "runs/x"},
        {"kind": "block", "shares": (0.5, 0.5)},
    ):
        with pytest.raises(UnspoolError):
            TwinSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UnspoolError, match="neither a draft head"):
        trained(settings(here, "draft", start=str(here / "model")))
    with pytest.raises(UnspoolError, match="a model of another shape"):
        trained(settings(here, "draft", start=str(SHIPPED / "smollm2-135m-instruct")))
    with pytest.raises(UnspoolError, match="no unused token for the mask"):
        trained(settings(here, "block", mask=None))
    assert not Run.all()


def test_the_mask_is_a_token_that_no_text_uses():
    vocabulary: Any = SimpleNamespace(
        bos_id=1, eos_id=2, unk_id=None, pad_id=2, end_ids=frozenset({2}), vocab_size=20,
        chat_template="<|im_start|>",
        special_tokens={"<|im_start|>": 1, "<|im_end|>": 2, "<file>": 7, "<empty>": 16},
    )  # fmt: skip
    assert mask_token(a_config(vocab_size=20), vocabulary) == 16
    vocabulary.special_tokens = {"<mask>": 3, "<file>": 7}
    assert mask_token(a_config(vocab_size=20), vocabulary) == 3
    vocabulary.special_tokens = {"<|im_end|>": 2}
    assert mask_token(a_config(vocab_size=64), vocabulary) == 63
    assert mask_token(a_config(vocab_size=64, mask_id=9), vocabulary) == 9


def a_config(**changes: Any) -> Any:
    from dataclasses import replace

    from helpers.tiny_training import CONFIG

    return replace(CONFIG, **changes)
