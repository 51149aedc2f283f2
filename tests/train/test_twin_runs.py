"""Twins of a tiny model as runs: what they learn from, what comes out, and going on exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import unspool
from helpers import tiny
from helpers.tiny_training import CONFIG, tiny_model
from unspool.cli.main import _exit_code
from unspool.decoding.speculative.head import SHIPPED
from unspool.errors import UnspoolError
from unspool.model.adapters import CanvasAdapterSettings, read_adapter
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.model.layers.parts import apply_rope
from unspool.model.layers.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.running.events import Event, StepLogged
from unspool.train.running.loop import Trainer
from unspool.train.running.runs import Run
from unspool.train.twins.draft_head import (
    DraftHead,
    DraftHeadObjective,
    HeadShape,
    UnrolledDrafts,
    feature_layers,
    most_frequent_tokens,
    open_head,
    rms,
    save_head,
)
from unspool.train.twins.settings import TwinSettings
from unspool.train.twins.twin import mask_token, new_run, settings_of, train_twin

QUICK: dict[str, Any] = {
    "chat": 6, "chat_tokens": 20, "batch": 4, "length": 32, "steps": 4, "device": "cpu",
    "judge_every": 100, "save_every": 100,
}  # fmt: skip
DRAFT: dict[str, Any] = {"draft_tokens": 64, "draft_steps": 3, "chat_share": 1.0}
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
    if kind not in ("block", "fill", "draft"):
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


@pytest.fixture(scope="module")
def draft_run(here: Path) -> tuple[Run, list[float]]:
    return trained(settings(here, "draft", steps=12, rate=0.01, **DRAFT))


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


def test_a_drafting_head_learns_and_is_saved(here: Path, draft_run: tuple[Run, list[float]]):
    run, losses = draft_run
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    report = json.loads((run.final / "config.json").read_text())
    assert report["format"] == "unspool-draft-head" and report["layers"] == [0, 1, 3]
    with unspool.load(here / "model", backend="torch") as lm:
        assert report["fingerprint"] == lm.model.fingerprint()
    shape, weights = open_head(run.final)
    assert shape.tokens == 64 and weights["ids"].shape == (64,)
    config = open_checkpoint(here / "model").config
    DraftHead(config, shape, weights["ids"]).load_state_dict(weights)  # all of them, as they were


@pytest.mark.parametrize("start", ["folder", "final"])
def test_a_drafting_head_goes_on_from_a_run_or_a_folder(
    start: str, here: Path, draft_run: tuple[Run, list[float]]
):
    first, losses = draft_run
    path = str(getattr(first, start))
    again, later = trained(settings(here, "draft", start=path, steps=1, rate=1e-6, **DRAFT))
    assert later[0] < losses[0] - 0.05
    before = open_head(first.final)[1]
    for name, value in open_head(again.final)[1].items():
        torch.testing.assert_close(value, before[name], rtol=0.01, atol=0.002)


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


@pytest.mark.parametrize("kind", ["block", "fill", "draft", "countdown:2"])
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
    name = "head.safetensors" if kind == "draft" else "model.safetensors"
    assert (full.final / name).read_bytes() == (parts.final / name).read_bytes()


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
    assert _exit_code(["train", "twin", "--kind", "draft", "--lora", "3"]) != 0


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
    with pytest.raises(UnspoolError, match="neither a draft head"):
        trained(settings(here, "draft", start=str(here / "model")))
    with pytest.raises(UnspoolError, match="a model of another shape"):
        trained(settings(here, "draft", start=str(SHIPPED / "smollm2-135m-instruct")))
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


# -- The drafting head against drafting one token after the other; its loss against its formula ---


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def a_head(model: Transformer) -> DraftHead:
    torch.manual_seed(4)
    head = DraftHead(model.config, HeadShape((0, 1), 20, 16, 8), torch.arange(3, 23))
    head.init_from(model)
    with torch.no_grad():
        head.change.weight.normal_(0, 0.2, generator=rng())
    return head


def a_batch() -> TrainingBatch:
    ids = torch.randint(0, 29, (2, 25), generator=rng(3))
    documents = torch.zeros(2, 24, dtype=torch.int32)
    documents[1, 13:] = 1
    loss_mask = torch.ones(2, 24, dtype=torch.bool)
    loss_mask[:, :7] = False
    return TrainingBatch(ids, loss_mask, documents)


@torch.no_grad()
def inner(model: Transformer, tokens: Tensor) -> Tensor:
    """What goes into both layers, by the specification's own forward pass."""
    recorded: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, given: recorded.append(given[0]))
        for layer in model.layers
    ]
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(recorded, 2)[0]


@torch.no_grad()
def drafted(
    model: Transformer, head: DraftHead, text: Tensor, extra: Tensor, first: int
) -> list[Tensor]:
    """Guesses behind `text` and behind each of the tokens that follow it, one after the other. The
    causal model has seen all of the text but its last token. Positions count from `first`."""
    eps, config = head.config.norm_eps, head.config
    count = len(text) - 1
    f = head.fuse_features(inner(model, text)[:count])
    places = np.arange(first, first + len(text) + len(extra))
    tables = model.rope_tables(places, 64)[-1]
    assert tables is not None
    cosine, sine = tables.cosine, tables.sine
    x = rms(f, head.context_norm, eps)
    keys, values = (
        part(x).view(count, config.kv_heads, config.head_width) for part in (head.k, head.v)
    )
    keys = apply_rope(keys, cosine[:count, None], sine[:count, None])
    nothing = torch.zeros(1, config.kv_heads, config.head_width)
    keys, values = torch.cat((nothing, keys)), torch.cat((nothing, values))
    before = f[-1] if count else torch.zeros(config.width)
    known_names, guesses = text.tolist(), []
    layer = head.layers[0]
    for step in range(len(extra) + 1):
        state = head.join_inputs(before, model.embed.weight[known_names[-1]])
        query = layer.q(rms(state, layer.norm, eps)).view(config.heads, config.head_width)
        query = apply_rope(query, cosine[count + step], sine[count + step])
        group = config.heads // config.kv_heads
        mixed = []
        for number in range(config.heads):
            weights = (keys[:, number // group] @ query[number] * config.scale).softmax(0)
            mixed.append(weights @ values[:, number // group])
        state = state + layer.out(torch.cat(mixed))
        fed = rms(state, layer.feed_norm, eps)
        state = state + layer.down(torch.nn.functional.silu(layer.gate(fed)) * layer.up(fed))
        before = state
        said = [
            head.recent(rms(model.embed.weight[known_names[-1 - back]], head.recent_norm, eps))
            .chunk(4)[back]
            for back in range(4)
        ]  # fmt: skip
        guesses.append(head.output_state(state, head.from_recent(torch.cat(said))))
        if step < len(extra):
            known_names.append(int(extra[step]))
    return guesses


def test_drafts_of_whole_rows_are_those_of_one_text():
    model, batch = tiny_model().requires_grad_(False), a_batch()
    head = a_head(model)
    drafts = UnrolledDrafts(model, head, batch, {})
    result = [drafts.step(ahead) for ahead in range(3)]
    for row, begin, place in ((0, 0, 9), (0, 0, 5), (1, 13, 18)):
        text = batch.inputs[row, begin : place + 1]
        extra = batch.inputs[row, place + 1 : place + 3]
        for ahead, guess in enumerate(drafted(model, head, text, extra, begin)):
            assert torch.allclose(result[ahead][row, place], guess, atol=1e-4), (row, place, ahead)


def test_the_loss_compares_with_what_the_causal_model_says():
    model, batch = tiny_model().requires_grad_(False), a_batch()
    head = a_head(model)
    loss = DraftHeadObjective(model, steps=3)(head, batch, rng())
    drafts = UnrolledDrafts(model, head, batch, {})
    table = model.embed.weight[3:23]
    weights = [math.exp(-ahead / 4) for ahead in range(3)]
    total = torch.tensor(0.0)
    for ahead in range(3):
        guess, losses = drafts.step(ahead), []
        for row, end in ((0, 24), (1, 24)):
            for place in range(7, 24):
                begin = 13 if row == 1 and place >= 13 else 0
                end = 13 if row == 1 and place < 13 else 24
                if place + ahead + 1 >= end:
                    continue
                said = model(batch.inputs[row : row + 1, begin : place + ahead + 1])[0, -1]
                chances = (said / 0.8).softmax(-1)[3:23]
                logprobs = (table @ guess[row, place] / 0.8).log_softmax(-1)
                losses.append(-(chances * logprobs).sum())
        total = total + torch.stack(losses).mean() * weights[ahead] / sum(weights)
    assert torch.allclose(loss.mean, total, rtol=1e-4)
    loss.mean.backward()
    assert all(value.grad is not None for value in head.parameters())
    assert all(value.grad is None for value in model.parameters())


@pytest.mark.parametrize("type", ["F16", "Q8_0", "Q4_1"])
def test_a_head_comes_back_from_its_files(type: str, tmp_path: Path):
    model = tiny_model(width=64, head_width=32, heads=2, kv_heads=1, ff_width=96)
    head = DraftHead(model.config, HeadShape((0, 1), 20, 32, 32), torch.arange(3, 23))
    save_head(
        head.state_dict(), head.shape, head.config, tmp_path, base="it", fingerprint="f", type=type
    )
    shape, weights = open_head(tmp_path)
    assert shape == head.shape
    exactness = {"F16": 1e-3, "Q8_0": 2e-2, "Q4_1": 0.2}[type]
    for name, value in head.state_dict().items():
        far = (weights[name] - value).abs().max()
        assert far <= exactness * float(value.abs().max()) + 1e-6, name


def test_the_layers_that_are_read():
    assert feature_layers(30) == (2, 11, 20, 27)
    assert feature_layers(1) == (0,)
    assert max(feature_layers(4)) < 4


def test_the_tokens_that_can_be_drafted_are_those_written_most():
    written = np.repeat([7, 2, 9, 4], [5, 1, 3, 2])
    assert most_frequent_tokens(written, 12, 3).tolist() == [4, 7, 9]
    assert len(most_frequent_tokens(written, 12, 50)) == 12


@pytest.mark.parametrize("changes", [{"norm_plus_one": True}, {"tied": False}])
def test_heads_of_other_models(changes: dict[str, bool]):
    model = tiny_model(**changes).requires_grad_(False)
    loss = DraftHeadObjective(model, steps=2)(a_head(model), a_batch(), rng())
    assert torch.isfinite(loss.mean)
