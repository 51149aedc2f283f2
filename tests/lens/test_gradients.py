"""Gradients: the same as autograd on a model of transformers; the axiom of completeness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import tiny
from unspool.backends.interventions import Intervention, Replace, Scale, resolve
from unspool.errors import SettingsError, UnspoolError

TEXT = [1, 40, 77, 3, 200, 11]
OTHER_TEXT = [1, 40, 78, 3, 20, 11]
TOKEN, RIVAL = 5, 9


@pytest.fixture(scope="module")
def llama(family_lm: Callable[[str], Any]) -> Any:
    return family_lm("llama")


def reference_logits(model: Any, embeddings: Any) -> Any:
    return model(inputs_embeds=embeddings, use_cache=False).logits[:, -1]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_x_input_is_that_of_autograd(family, family_lm):
    reference = tiny.make(family)
    tokens = torch.tensor([TEXT])
    embeddings = reference.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = reference_logits(reference, embeddings)[0]
    (gradient,) = torch.autograd.grad(logits[TOKEN] - logits[RIVAL], embeddings)
    inputs = embeddings.detach()
    if family == "gpt2":  # the input vector has the position embedding
        inputs = inputs + reference.transformer.wpe.weight[: len(TEXT)].detach()
    expected = (gradient * inputs)[0].sum(-1)
    result = family_lm(family).token_attribution(
        TEXT, token=TOKEN, against=RIVAL, method="gradient_x_input"
    )
    np.testing.assert_allclose([v.value for v in result.values], expected, atol=2e-4, rtol=1e-3)
    assert result.logit == pytest.approx((logits[TOKEN] - logits[RIVAL]).item(), abs=1e-3)


def test_integrated_gradients_are_those_of_a_fine_riemann_sum(llama):
    """By the definition (Sundararajan et al. 2017), with autograd on transformers."""
    reference = tiny.make("llama")
    embed = reference.get_input_embeddings()
    end, start = (embed(torch.tensor([text])).detach() for text in (TEXT, OTHER_TEXT))
    steps = 400
    points = (torch.arange(steps) + 0.5) / steps
    mixed = (start + points[:, None, None] * (end - start)).requires_grad_()
    (gradient,) = torch.autograd.grad(reference_logits(reference, mixed)[:, TOKEN].sum(), mixed)
    expected = (gradient.mean(0) * (end - start)[0]).sum(-1)
    result = llama.token_attribution(TEXT, token=TOKEN, baseline=OTHER_TEXT)
    np.testing.assert_allclose([v.value for v in result.values], expected, atol=2e-3)
    assert [v.value for v in result.values][:2] == [0, 0]  # where the texts are the same
    before = reference_logits(reference, start)[0, TOKEN]
    assert result.baseline == pytest.approx(before.item(), abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_integrated_gradients_are_complete(family, family_lm):
    result = family_lm(family).token_attribution(TEXT, baseline=OTHER_TEXT, token=TOKEN, steps=96)
    total = sum(item.value for item in result.values)
    assert abs(result.logit - result.baseline) > 1e-3
    assert total == pytest.approx(result.logit - result.baseline, abs=0.01)
    assert result.gap == pytest.approx(result.logit - result.baseline - total, abs=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_without_a_baseline_it_is_the_mean_embedding(family, family_lm):
    result = family_lm(family).token_attribution(TEXT, token=TOKEN, steps=96)
    reference = tiny.make(family)
    embed = reference.get_input_embeddings()
    rows = embed(torch.tensor([TEXT])).detach()
    scale = getattr(embed, "embed_scale", 1.0)  # Gemma's module multiplies the rows
    rows[:, 1:] = embed.weight.detach().mean(0) * scale
    expected = reference_logits(reference, rows)[0, TOKEN]
    assert result.baseline == pytest.approx(expected.item(), abs=2e-3)
    assert result.values[0].value == 0 and abs(result.values[1].value) > 1e-5
    assert abs(result.gap) < 0.01


def test_the_token_and_the_position(llama):
    following = llama.token_attribution(TEXT, 2, steps=2)
    assert following.token == TEXT[3] and len(following.values) == 3
    last = llama.token_attribution(TEXT, steps=2)
    assert last.token == llama.look(TEXT).most_likely and len(last.values) == len(TEXT)
    decoded = last.to_dict()
    assert decoded["values"][0]["token"] == 1 and decoded["gap"] == last.gap
    assert "TokenAttribution" in repr(last) and "<table" in last._repr_html_()


CLEAN, CORRUPTED = TEXT, OTHER_TEXT


@pytest.mark.parametrize("site", ["resid_post", "attn_out", "mlp_out", "embedding"])
def test_approximate_patching_is_the_gradient_times_the_change(site, llama):
    """The derivative of exact patching: a small step from the corrupted to the clean value."""
    approximate = llama.patch(
        CLEAN, CORRUPTED, answer=TOKEN, other=RIVAL, site=site, approximate=True, progress=False
    )
    exact = llama.patch(CLEAN, CORRUPTED, answer=TOKEN, other=RIVAL, site=site, progress=False)
    assert approximate.axes == exact.axes and approximate.labels == exact.labels
    for text in (approximate.describe(), repr(approximate)):
        assert "estimated" in text
    assert "estimated" not in exact.describe() + repr(exact)
    assert approximate.baseline == pytest.approx(exact.baseline, abs=1e-4)
    reads = [llama.activations(text, sites=site)[site] for text in (CLEAN, CORRUPTED)]
    step = 0.02
    for cell, (intervention,) in list(exact.cells.items())[::3]:
        *layer, position = cell
        clean, corrupted = (read[(*layer, position)] for read in reads)
        gaps = []
        for factor in (step, -step):
            op = Replace((corrupted + factor * (clean - corrupted))[None, None])
            change = replace(intervention, op=op)
            with llama.open_branch(CORRUPTED, None, resolve((change,), len(CORRUPTED))) as branch:
                logits = np.asarray(llama.engine.extend(branch), np.float64)[-1]
            gaps.append(logits[TOKEN] - logits[RIVAL])
        slope = (gaps[0] - gaps[1]) / (2 * step)
        assert approximate.effects[cell] == pytest.approx(slope, abs=0.02, rel=0.02)


@pytest.mark.parametrize("site", ["resid_post", "attn_out", "mlp_out"])
def test_approximate_patching_is_that_of_autograd_on_transformers(site, llama):
    reference = tiny.make("llama")
    runs = []
    for text in (CLEAN, CORRUPTED):
        values: list[Any] = []
        handles = []
        for block in reference.model.layers:
            module = {"resid_post": block, "attn_out": block.self_attn, "mlp_out": block.mlp}[site]
            handles.append(
                module.register_forward_hook(
                    lambda module, inputs, output, values=values: values.append(
                        output[0] if isinstance(output, tuple) else output
                    )
                )
            )
        logits = reference(torch.tensor([text]), use_cache=False).logits[0, -1]
        for handle in handles:
            handle.remove()
        runs.append((logits[TOKEN] - logits[RIVAL], values))
    gradients = torch.autograd.grad(runs[1][0], runs[1][1])
    changes = [(a - b).detach() for a, b in zip(runs[0][1], runs[1][1], strict=True)]
    expected = torch.stack(
        [(change * g)[0].sum(-1) for change, g in zip(changes, gradients, strict=True)]
    )
    sweep = llama.patch(
        CLEAN, CORRUPTED, answer=TOKEN, other=RIVAL, site=site, approximate=True, progress=False
    )
    np.testing.assert_allclose(sweep.effects, expected, atol=5e-3, rtol=1e-3)
    assert np.ptp(expected.numpy()) > 0.1


def test_heads_sum_to_the_attention_output(llama):
    options = {"answer": TOKEN, "approximate": True, "progress": False}
    heads = llama.patch(CLEAN, CORRUPTED, site="head_out", **options)
    assert heads.axes == ("layer", "head") and heads.values.shape == (4, 6)
    full = llama.patch(CLEAN, CORRUPTED, site="attn_out", sweep=["layer"], **options)
    np.testing.assert_allclose(heads.effects.sum(1), full.effects, atol=1e-4)
    two = llama.patch(
        CLEAN, CORRUPTED, site="head_out", heads=[1, 3], sweep=["layer"], layers=[0, 2], **options
    )
    expected = heads.effects[[0, 2]][:, [1, 3]].sum(1)
    np.testing.assert_allclose(two.effects, expected, atol=1e-5)


def test_bad_settings(llama, small_lm):
    for options, words in (
        ({"method": "saliency"}, "method must be"),
        ({"steps": 0}, "steps"),
        ({"position": 6}, "position"),
        ({"baseline": [1, 2]}, "as many tokens"),
        ({"token": 999}, "vocabulary"),
    ):
        with pytest.raises(SettingsError, match=words):
            llama.token_attribution(TEXT, **options)
    with pytest.raises(SettingsError, match="needs an answer"):
        llama.patch(CLEAN, CORRUPTED, metric=lambda logits: 0.0, approximate=True, progress=False)
    with pytest.raises(SettingsError, match="has the sites"):
        llama.patch(CLEAN, CORRUPTED, answer=5, site="final_norm", approximate=True, progress=False)
    with pytest.raises(UnspoolError, match="backend='torch'"):
        small_lm.token_attribution("a cat")
    steered = llama.generate(TEXT, max_tokens=1, interventions=[Intervention("mlp_out", Scale(0))])
    with pytest.raises(SettingsError, match="without adapters and interventions"):
        llama.token_attribution(steered)
