"""Tuned and Jacobian lenses: the paper's formula and autograd, both on a model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import tiny
from unspool.errors import ModelFileError, SettingsError, UnspoolError
from unspool.lens.activations import get_activations
from unspool.lens.affine_lens import AffineLens, load_lens
from unspool.lens.logit_lens import logit_lens
from unspool.sampling import log_softmax

RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(3, 259, 40).tolist() for _ in range(12)]
LAYERS, WIDTH = 4, 48


@pytest.fixture(scope="module")
def llama(family_lm: Callable[[str], Any]) -> Any:
    return family_lm("llama")


@pytest.fixture(scope="module")
def tuned(llama: Any) -> AffineLens:
    lens: AffineLens = llama.fit_lens(TEXTS, rank=WIDTH, progress=False)
    return lens


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny.make("llama")


def reference_residuals(model: Any, tokens: list[int]) -> list[Any]:
    """The residual stream before each layer of transformers' model, and after the last one."""
    states: list[Any] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][0]))
        for layer in model.model.layers
    ]
    handles.append(
        model.model.norm.register_forward_pre_hook(
            lambda module, inputs: states.append(inputs[0][0])
        )
    )
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return states


def test_the_lens_is_the_formula_of_the_paper(llama, tuned, reference):
    """TunedLens(h) = head(norm(h + A h + b)), on vectors that hooks on transformers have read."""
    text = TEXTS[0][:9]
    lens = logit_lens(llama, get_activations(llama, text), lens=tuned, full_vocabulary=True)
    states = reference_residuals(reference, text)
    for layer in range(LAYERS):
        h = states[layer][-1]
        change = torch.from_numpy(tuned.up[layer] @ tuned.down[layer])
        translated = h + change @ h + torch.from_numpy(tuned.bias[layer])
        with torch.no_grad():
            logits = reference.lm_head(reference.model.norm(translated))
        expected = logits.log_softmax(-1).numpy()
        np.testing.assert_allclose(lens.logprobs[layer], expected, atol=2e-3)
    plain = logit_lens(llama, get_activations(llama, text), full_vocabulary=True)
    assert lens.kind == "tuned" and plain.kind == "logit"
    np.testing.assert_array_equal(lens.logprobs[-1], plain.logprobs[-1])
    assert np.abs(lens.logprobs[0] - plain.logprobs[0]).max() > 0.1


def test_a_tuned_lens_is_the_weighted_regression(tuned, reference):
    """The same as least squares of torch, on vectors that hooks on transformers have read."""
    streams = [torch.stack(reference_residuals(reference, text)).double() for text in TEXTS]
    stream = torch.cat(streams, 1)
    final = stream[-1]
    weights = 1 / (final.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for layer in range(LAYERS):
        inputs = torch.cat((stream[layer], torch.ones_like(weights)), 1) * weights
        # The ridge, as rows that pull the change to zero.
        strength = (30 * (inputs**2).sum(0).median() / len(inputs)).sqrt()
        rows = torch.cat((inputs, strength * torch.eye(WIDTH + 1, dtype=torch.float64)))
        targets = torch.cat(
            ((final - stream[layer]) * weights, torch.zeros(WIDTH + 1, WIDTH, dtype=torch.float64))
        )
        solution = torch.linalg.lstsq(rows, targets).solution
        change = tuned.up[layer] @ tuned.down[layer]
        np.testing.assert_allclose(change, solution[:-1].T, atol=2e-3)
        np.testing.assert_allclose(tuned.bias[layer], solution[-1], atol=2e-3)


def test_the_jacobian_is_that_of_autograd(llama, reference):
    """With probes=0: the mean over positions of d final / d h at the same position."""
    texts = [TEXTS[0][:3], TEXTS[1][:2]]
    lens = llama.fit_lens(texts, kind="jacobian", rank=WIDTH, probes=0, progress=False)
    total = torch.zeros(LAYERS, WIDTH, WIDTH)
    for text in texts:
        states = reference_residuals(reference, text)
        for layer in range(LAYERS):

            def final_of(x: Any, layer: int = layer, text: list[int] = text) -> Any:
                def replace(module: Any, inputs: Any, kwargs: Any) -> Any:
                    return (x[None], *inputs[1:]), kwargs

                final: list[Any] = []
                handles = (
                    reference.model.layers[layer].register_forward_pre_hook(
                        replace, with_kwargs=True
                    ),
                    reference.model.norm.register_forward_pre_hook(
                        lambda module, inputs: final.append(inputs[0][0])
                    ),
                )
                reference(torch.tensor([text]), use_cache=False)
                for handle in handles:
                    handle.remove()
                return final[0]

            jacobian = torch.autograd.functional.jacobian(final_of, states[layer])
            for at in range(len(text)):
                total[layer] += jacobian[at, :, at]
    mean = total / sum(map(len, texts))
    for layer in range(LAYERS):
        change = lens.up[layer] @ lens.down[layer]
        np.testing.assert_allclose(change + np.eye(WIDTH), mean[layer], atol=2e-3)


def test_random_probes_approach_the_exact_jacobian(llama):
    texts = [TEXTS[0][:4]]
    exact, few, many = (
        (lens.up @ lens.down).ravel()
        for lens in (
            llama.fit_lens(texts, kind="jacobian", rank=WIDTH, probes=probes, progress=False)
            for probes in (0, 15, 150)
        )
    )
    errors = [np.linalg.norm(estimate - exact) for estimate in (few, many)]
    assert errors[1] < errors[0] / 2


def test_a_low_rank_keeps_most_of_a_lens(llama, tuned):
    residuals = get_activations(llama, TEXTS[2], 11).residuals
    small, full = (
        lens.translate(residuals)[1]
        for lens in (llama.fit_lens(TEXTS, rank=24, progress=False), tuned)
    )
    error = np.linalg.norm(small - full)
    assert 0 < error < 0.5 * np.linalg.norm(full - residuals[1])


def test_saved_and_loaded(tmp_path: Path, llama, tuned):
    path = tmp_path / "lens.safetensors"
    tuned.save(path)
    loaded = load_lens(path)
    assert (loaded.kind, loaded.fingerprint, loaded.num_tokens) == ("tuned", tuned.fingerprint, 480)
    residuals = get_activations(llama, TEXTS[2], 11).residuals
    expected = tuned.translate(residuals)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(loaded.translate(residuals), expected, atol=0.02 * scale)
    assert llama.load_lens(path) is llama.lenses["lens"]
    by_name = llama.logit_lens(TEXTS[2], 11, lens="lens")
    assert (
        by_name.layers
        == logit_lens(llama, get_activations(llama, TEXTS[2], 11), lens=loaded).layers
    )


def test_a_lens_of_another_model_is_refused(tmp_path: Path, tuned, family_lm, llama, tiny_lm):
    with pytest.raises(SettingsError, match=r"4 layers of width 48.*this one has 7"):
        family_lm("gemma3").logit_lens(TEXTS[0], lens=tuned)
    with pytest.raises(SettingsError, match="other weights"):
        family_lm("qwen2").logit_lens(TEXTS[0], lens=tuned)
    path = tmp_path / "lens.safetensors"
    tuned.save(path)
    with pytest.raises(SettingsError, match="other weights"):
        family_lm("qwen2").load_lens(path)
    with pytest.raises(SettingsError, match="no lens 'sharp' \\(loaded: logit"):
        llama.logit_lens(TEXTS[0], lens="sharp")


def test_bad_settings(llama, small_lm):
    for options, words in (
        ({"kind": "round"}, "kind must be"),
        ({"rank": 0}, "rank"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"probes": -1}, "probes"),
        ({"kind": "jacobian"}, "at least 48 probes"),
    ):
        with pytest.raises(SettingsError, match=words):
            llama.fit_lens([[5, 6, 7]], progress=False, **options)
    with pytest.raises(SettingsError, match="at least one text"):
        llama.fit_lens([], progress=False)
    with pytest.raises(UnspoolError, match="backend='torch'"):
        small_lm.fit_lens(["a cat"], kind="jacobian", progress=False)


def test_damaged_files(tmp_path: Path, tuned):
    path = tmp_path / "lens.safetensors"
    tuned.save(path)
    content = path.read_bytes()
    for old, new, words in (
        (b"unspool affine lens", b"something different", "not an affine lens"),
        (b'"version": "1"', b'"version": "9"', "version '9'"),
        (b'"bias"', b'"bios"', "bias is missing"),
    ):
        assert old in content
        path.write_bytes(content.replace(old, new))
        with pytest.raises(ModelFileError, match=words):
            load_lens(path)
    path.write_bytes(content[:-4])
    with pytest.raises(ModelFileError, match="truncated"):
        load_lens(path)


@pytest.mark.real
@pytest.mark.parametrize("name", ["tuned", "jacobian"])
def test_the_lenses_of_the_default_model(real_lm: Any, name: str):
    lens = real_lm.lenses[name]
    lens.check_model(real_lm.config.layers, real_lm.config.width, real_lm.model.fingerprint())
    activations = get_activations(
        real_lm, "The capital of Germany is Berlin. The capital of France"
    )
    results = [
        logit_lens(real_lm, activations, lens=lens, full_vocabulary=True).logprobs[1:-1]
        for lens in (None, lens)
    ]
    final = log_softmax(activations.logits[None])[0].astype(np.float64)
    plain, translated = ((np.exp(final) * (final - result)).sum(-1) for result in results)
    assert translated.mean() < plain.mean() / 1.5  # over the layers
