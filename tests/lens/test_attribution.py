"""A logit as the sum of what each part of the model added."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from unspool.errors import UnspoolError
from unspool.lens.activations import get_activations
from unspool.lens.attribution import attribution

TOKENS = [1, 40, 77, 3, 200, 11, 90, 54, 8, 130]
FAMILIES = [  # of every kind of norm, residual, head and feed-forward
    "llama", "llama-tied-bias", "gpt2", "gpt-neox", "gpt-neox-sequential", "gemma2", "gemma3",
    "olmo2", "mixtral", "qwen3-moe", "gpt-oss", "granite", "gemma4-all",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_sum_to_the_logit(family, family_lm):
    lm = family_lm(family)
    worst = 0.0
    for position in (0, 9):
        activations = get_activations(lm, TOKENS, position)
        for token in (None, 258):
            for against in (None, 31, "mean"):
                result = attribution(lm, activations, token=token, against=against)
                worst = max(worst, abs(result.rest))
                assert result.logit == pytest.approx(_uncapped(lm, activations, result), abs=1e-3)
                if not result.softcap:
                    assert result.said == result.logit
    assert worst < 1e-3
    names = [(part.name, part.layer) for part in result.parts]
    layers = range(1, lm.config.layers + 1)
    layer_parts = [(name, n) for n in layers for name in ("attention", "feed_forward")]
    assert names[: 1 + len(layer_parts)] == [("embedding", None), *layer_parts]
    biased = [("norm_bias", None)] if lm.config.norm == "layer" else []
    assert names[1 + len(layer_parts) :] == biased + [("head_bias", None)] * lm.config.head_bias


def _uncapped(lm, activations, result):
    """The logit before the cap, by the model's own arithmetic."""
    with torch.inference_mode():
        normed = lm.transformer.norm(torch.from_numpy(activations.residuals[-1]))
        head = lm.transformer.head
        weight = head.weight if head is not None else lm.transformer.embed.weight
        bias = head.bias if head is not None else None
        logits = torch.nn.functional.linear(normed, weight, bias).double().numpy()
    logits = logits * lm.config.logit_scale
    if result.against is None:
        return logits[result.token]
    return logits[result.token] - (
        logits.mean() if result.against == "mean" else logits[result.against]
    )


def test_taking_a_part_away_takes_its_share(family_lm):
    """Each share is what the logit loses without that part, the norm's scale held: an oracle."""
    lm = family_lm("llama")
    activations = get_activations(lm, TOKENS, 5)
    result = attribution(lm, activations, token=12)
    final = activations.residuals[-1]
    with torch.inference_mode():
        for part in result.parts:
            if part.layer is None:
                vector = activations.residuals[0]
            else:
                vector = activations.parts[part.layer - 1, int(part.name == "feed_forward")]
            # Scaled so that the norm divides by what it divided by in the run.
            size = np.sqrt((final.astype(np.float64) ** 2).mean())
            rms = np.sqrt((vector.astype(np.float64) ** 2).mean())
            alone = lm.model.logits(vector[None] / rms)[0, 12] * rms / size
            assert part.value == pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "gemma2-file"])
def test_soft_capping_is_told(family, family_lm):
    lm = family_lm(family)
    activations = get_activations(lm, TOKENS, 5)
    result = attribution(lm, activations, token=3)
    cap = lm.config.logit_softcap
    assert result.softcap == cap > 0
    assert result.said == pytest.approx(float(activations.logits[3]))
    assert cap * math.tanh(result.logit / cap) == pytest.approx(result.said, abs=1e-3)
    assert result.said != result.logit


def test_a_head_with_a_bias(family_lm):
    """Some files have one (phi, gpt-j); here it is put on a tiny model by hand."""
    from dataclasses import replace

    lm = family_lm("qwen2")
    transformer = lm.transformer
    config, head = transformer.config, transformer.head
    activations = get_activations(lm, TOKENS, 5)
    transformer.head = torch.nn.Linear(config.width, config.vocab_size, bias=True)
    transformer.config = replace(config, head_bias=True)
    try:
        logits = lm.model.logits(activations.residuals[-1:])[0]
        for against in (None, "mean", 9):
            result = attribution(lm, replace(activations, logits=logits), token=3, against=against)
            assert result.parts[-1].name == "head_bias"
            assert abs(result.rest) < 1e-3
    finally:
        transformer.config, transformer.head = config, head


def test_the_picked_token_is_the_default(tiny_lm):
    activations = get_activations(tiny_lm, TOKENS, 5)
    assert attribution(tiny_lm, activations).token == TOKENS[6]
    last = get_activations(tiny_lm, TOKENS)
    assert attribution(tiny_lm, last).token == last.most_likely


def test_wrong_tokens_are_refused(tiny_lm):
    activations = get_activations(tiny_lm, TOKENS, 5)
    for options in ({"token": 259}, {"against": -1}, {"against": "median"}, {"token": True}):
        with pytest.raises(UnspoolError, match=r"vocabulary|tokenizer"):
            attribution(tiny_lm, activations, **options)


def test_for_json(tiny_lm):
    result = attribution(tiny_lm, get_activations(tiny_lm, TOKENS, 5), against="mean")
    decoded = json.loads(json.dumps(result.to_dict()))
    assert decoded["against"] == "mean" and len(decoded["parts"]) == 9
    total = sum(part["value"] for part in decoded["parts"])
    assert total + decoded["rest"] == pytest.approx(decoded["logit"], abs=1e-9)
    strongest = result.strongest(2)
    assert abs(strongest[0].value) >= abs(strongest[1].value)


def test_on_native_kernels(lm):
    generation = lm.generate("The capital of Germany is", max_tokens=2, temperature=0, seed=0)
    for step in generation.steps:
        activations = get_activations(lm, generation, step.position - 1)
        for against in (None, "mean"):
            assert abs(attribution(lm, activations, against=against).rest) < 1e-2
