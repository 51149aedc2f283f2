"""Every family that looks ahead gives transformers' logits, on every backend, from every file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers import tiny_masked
from helpers.gguf_converted import MASKED, converted_models
from unspool import native
from unspool.backends.cpu.model import load_cpu
from unspool.backends.step import Backend, LoadedModel, ObserveRequest, StepBatch, TableUpdates
from unspool.backends.torch.backend import TorchModel
from unspool.model.files.checkpoint import (
    Checkpoint,
    load_transformer,
    open_checkpoint,
    save_checkpoint,
)
from unspool.model.files.export import save_gguf
from unspool.model.weights import parameter_count, weight_shapes
from unspool.train.learning.forward import AttentionMask, hidden_states

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CLOSE = 2e-4  # 5e-5 at the most was seen, in logits of size 13
CLOSE_FAR = 1e-3  # in long texts, where angles are large
Case = tuple[str, tiny_masked.Logits, Checkpoint]
BERTS = [name for name, family in tiny_masked.FAMILIES.items() if family.is_bert]


def some_tokens(count: int = 45) -> torch.Tensor:
    return torch.randint(3, 257, (1, count), generator=torch.Generator().manual_seed(1))


def difference(a: Any, b: Any) -> float:
    assert a.shape == b.shape
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


@pytest.fixture(scope="module", params=tiny_masked.FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, tiny_masked.save(request.param, folder), open_checkpoint(folder)


def loaded(kind: str, checkpoint: Checkpoint) -> LoadedModel:
    if kind == "torch":
        return TorchModel(load_transformer(checkpoint))
    if native.missing_reason() is not None:
        pytest.skip(str(native.missing_reason()))
    return load_cpu(checkpoint, store="float32", kv_bits=32, threads=2)


def at_once(
    backend: Backend, tokens: torch.Tensor, ends: Any, look: ObserveRequest | None = None
) -> Any:
    """A whole text in one run, in pages that lie in no order."""
    count = tokens.shape[1]
    pages = np.random.default_rng(0).permutation(backend.page_count)[: -(-count // 16)]
    batch = StepBatch(
        tokens[0].numpy(),
        np.arange(count),
        ends,
        np.array([0, count]),
        np.array([3]),
        table_updates=TableUpdates(np.full(len(pages), 3), np.arange(len(pages)), pages),
        logits_indices=np.arange(count),
        observe=look,
    )
    return backend.launch(batch).result()


# -- what is computed ------------------------------------------------------------------------


def test_what_the_files_say(case: Case):
    name, _, checkpoint = case
    result = checkpoint.config.to_dict()
    expected = tiny_masked.FAMILIES[name].expected
    assert {key: result[key] for key in expected} == expected


def test_the_plain_transformer(case: Case):
    _, expected, checkpoint = case
    model, tokens = load_transformer(checkpoint), some_tokens()
    reference = expected(tokens)
    assert reference.std() > 0.2, "logits of a constant model would prove nothing"
    assert difference(model(tokens), reference) < CLOSE
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == weight_shapes(model.config)
    assert parameter_count(model.config) == sum(p.numel() for p in model.parameters())


def test_the_forward_pass_of_training(case: Case):
    _, expected, checkpoint = case
    model, tokens = load_transformer(checkpoint), some_tokens()
    x = hidden_states(model, tokens, AttentionMask.build(model.config, tokens))
    assert difference(model.logits(x), expected(tokens)) < CLOSE


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_pages(case: Case, kind: str):
    _, expected, checkpoint = case
    tokens, config = some_tokens(), checkpoint.config
    backend = loaded(kind, checkpoint).backend(memory=4 << 20, context=128)
    ends = np.array([config.visible_end(at, tokens.shape[1]) for at in range(tokens.shape[1])])
    result = at_once(backend, tokens, ends).logits
    assert difference(result, expected(tokens)[0]) < CLOSE


@pytest.mark.parametrize("name", ["bert", "modernbert", "llada"])
def test_both_backends_see_the_same_inside(tmp_path: Path, name: str):
    tiny_masked.save(name, tmp_path)
    checkpoint, tokens = open_checkpoint(tmp_path), some_tokens()
    count = tokens.shape[1]
    every, ends = np.arange(count), np.full(count, count)
    look = ObserveRequest(residuals=every[::3], attention=every[1::4], parts=every[::7])
    observed = []
    for kind in ("torch", "native"):
        backend = loaded(kind, checkpoint).backend(memory=4 << 20, context=128)
        observed.append(at_once(backend, tokens, ends, look).observations)
    model, reference = observed
    assert difference(model.residuals, reference.residuals) < 3e-4
    assert difference(model.parts, reference.parts) < 3e-4
    for single, other in zip(model.attention, reference.attention, strict=True):
        assert single.shape[-1] == count
        assert difference(single, other) < CLOSE
        assert difference(single.sum(-1), np.ones(single.shape[:2])) < CLOSE


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_window_reaches_ahead_in_long_texts(tmp_path: Path, kind: str):
    """More than a segment of keys and a chunk of queries; then single positions again, as a canvas
    computes them: masked keys are in other segments."""
    expected = tiny_masked.save("modernbert", tmp_path)
    tokens, count = some_tokens(1300), 1300
    backend = loaded(kind, open_checkpoint(tmp_path)).backend(memory=64 << 20, context=2048)
    reference = expected(tokens)[0]
    result = at_once(backend, tokens, np.full(count, count)).logits
    assert difference(result, reference) < CLOSE_FAR
    for place in (0, 509, 700, count - 1):
        again = StepBatch(
            tokens[0, place : place + 1].numpy(),
            np.array([place]),
            np.array([count]),
            np.array([0, 1]),
            np.array([3]),
            logits_indices=np.array([0]),
        )
        assert difference(backend.launch(again).result().logits[0], reference[place]) < CLOSE_FAR


# -- files -----------------------------------------------------------------------------------


def test_saved_and_loaded_again(case: Case, tmp_path: Path):
    name, expected, checkpoint = case
    model, tokens = load_transformer(checkpoint), some_tokens()
    save_checkpoint(model, tmp_path, largest_file=40_000)
    again = open_checkpoint(tmp_path)
    assert again.config == checkpoint.config
    assert difference(load_transformer(again)(tokens), model(tokens)) == 0
    if name in BERTS:
        reference = transformers.AutoModelForMaskedLM.from_pretrained(
            tmp_path, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            assert difference(reference(tokens).logits, expected(tokens)) < CLOSE


def test_a_causal_family_taught_to_look_ahead_is_saved_with_that(tmp_path: Path):
    from dataclasses import replace

    from helpers import tiny
    from unspool.model.layers.transformer import Transformer

    tiny.save("qwen3", tmp_path / "causal")
    causal = load_transformer(open_checkpoint(tmp_path / "causal"))
    taught = {"sight": "block", "block": 4, "mask_id": 7, "shifted": True}
    twin = Transformer(replace(causal.config, **taught))
    twin.load_state_dict(causal.state_dict())
    save_checkpoint(twin, tmp_path / "twin")
    again = open_checkpoint(tmp_path / "twin").config
    assert {name: getattr(again, name) for name in taught} == taught
    assert open_checkpoint(tmp_path / "causal").config.sight == "causal"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_models(tmp_path_factory)


@pytest.mark.parametrize("name", MASKED)
def test_gguf(converted: Path, name: str, tmp_path: Path):
    """From llama.cpp's converter, and written again by `save_gguf`."""
    expected = tiny_masked.save(name, tmp_path / "original")
    tokens, config = some_tokens(), tiny_masked.FAMILIES[name].expected
    model = load_transformer(open_checkpoint(converted / f"{name}.gguf"))
    assert (model.config.sight, model.config.shifted) == ("whole", config["shifted"])
    assert difference(model(tokens), expected(tokens)) < CLOSE
    folder = open_checkpoint(tmp_path / "original")
    save_gguf(load_transformer(folder), tmp_path / "again.gguf", type="F32", vocabulary={})
    again = open_checkpoint(tmp_path / "again.gguf")
    assert difference(load_transformer(again)(tokens), expected(tokens)) < CLOSE
    settings = (again.config.sight, again.config.mask_id, again.config.shifted)
    assert settings == ("whole", tiny_masked.MASK, config["shifted"])
