"""A logit as the sum of what each part of the model added."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tiny
import torch

from unspool.errors import UnspoolError
from unspool.lens.attribution import attribution
from unspool.lens.look import look

TOKENS = [1, 40, 77, 3, 200, 11, 90, 54, 8, 130]


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.NEWEST])
def test_parts_sum_to_the_logit(family, family_lm):
    lm = family_lm(family)
    worst = 0.0
    for position in (0, 4, 9):
        seen = look(lm, TOKENS, position)
        for token in (None, 7, 258):
            for against in (None, 31, "mean"):
                found = attribution(lm, seen, token=token, against=against)
                worst = max(worst, abs(found.rest))
                assert found.logit == pytest.approx(_uncapped(lm, seen, found), abs=1e-3)
                if not found.softcap:
                    assert found.said == found.logit
    print(f"attribution of {family}: off by {worst:.1e} at the most")
    assert worst < 1e-3
    names = [(part.name, part.layer) for part in found.parts]
    layers = range(1, lm.config.layers + 1)
    both = [(name, n) for n in layers for name in ("attention", "feed_forward")]
    assert names[: 1 + len(both)] == [("embedding", None), *both]
    biased = [("norm_bias", None)] if lm.config.norm == "layer" else []
    assert names[1 + len(both) :] == biased + [("head_bias", None)] * lm.config.head_bias


def _uncapped(lm, seen, found):
    """The logit before the cap, by the model's own arithmetic."""
    with torch.inference_mode():
        normed = lm.transformer.norm(torch.from_numpy(seen.residuals[-1]))
        head = lm.transformer.head
        weight = head.weight if head is not None else lm.transformer.embed.weight
        bias = head.bias if head is not None else None
        logits = torch.nn.functional.linear(normed, weight, bias).double().numpy()
    logits = logits * lm.config.logit_scale
    if found.against is None:
        return logits[found.token]
    return logits[found.token] - (
        logits.mean() if found.against == "mean" else logits[found.against]
    )


def test_taking_a_part_away_takes_its_share(family_lm):
    """Each share is what the logit loses without that part, the norm's scale held: an oracle."""
    lm = family_lm("llama")
    seen = look(lm, TOKENS, 5)
    found = attribution(lm, seen, token=12)
    final = seen.residuals[-1]
    with torch.inference_mode():
        for part in found.parts:
            if part.layer is None:
                vector = seen.residuals[0]
            else:
                vector = seen.parts[part.layer - 1, int(part.name == "feed_forward")]
            # Scaled so that the norm divides by what it divided by in the run.
            size = np.sqrt((final.astype(np.float64) ** 2).mean())
            own = np.sqrt((vector.astype(np.float64) ** 2).mean())
            alone = lm.model.logits(vector[None] / own)[0, 12] * own / size
            assert part.value == pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "gemma2-file"])
def test_soft_capping_is_told(family, family_lm):
    lm = family_lm(family)
    seen = look(lm, TOKENS, 5)
    found = attribution(lm, seen, token=3)
    cap = lm.config.logit_softcap
    assert found.softcap == cap > 0
    assert found.said == pytest.approx(float(seen.logits[3]))
    assert cap * math.tanh(found.logit / cap) == pytest.approx(found.said, abs=1e-3)
    assert found.said != found.logit


def test_a_head_with_a_bias(family_lm):
    """Some files have one (phi, gpt-j); here it is put on a tiny model by hand."""
    from dataclasses import replace

    lm = family_lm("qwen2")
    transformer = lm.transformer
    config, head = transformer.config, transformer.head
    seen = look(lm, TOKENS, 5)
    transformer.head = torch.nn.Linear(config.width, config.vocab_size, bias=True)
    transformer.config = replace(config, head_bias=True)
    try:
        logits = lm.model.logits(seen.residuals[-1:])[0]
        for against in (None, "mean", 9):
            found = attribution(lm, replace(seen, logits=logits), token=3, against=against)
            assert found.parts[-1].name == "head_bias"
            assert abs(found.rest) < 1e-3
    finally:
        transformer.config, transformer.head = config, head


def test_the_picked_token_is_the_default(tiny_lm):
    seen = look(tiny_lm, TOKENS, 5)
    assert attribution(tiny_lm, seen).token == TOKENS[6]
    last = look(tiny_lm, TOKENS)
    assert attribution(tiny_lm, last).token == last.likeliest


def test_wrong_tokens_are_refused(tiny_lm):
    seen = look(tiny_lm, TOKENS, 5)
    for options in ({"token": 259}, {"against": -1}, {"against": "median"}, {"token": True}):
        with pytest.raises(UnspoolError, match="vocabulary"):
            attribution(tiny_lm, seen, **options)


def test_for_json(tiny_lm):
    found = attribution(tiny_lm, look(tiny_lm, TOKENS, 5), against="mean")
    told = json.loads(json.dumps(found.to_dict()))
    assert told["against"] == "mean" and len(told["parts"]) == 9
    assert abs(sum(part["value"] for part in told["parts"]) + told["rest"] - told["logit"]) < 1e-9
    strongest = found.strongest(2)
    assert abs(strongest[0].value) >= abs(strongest[1].value)


@pytest.mark.real
@pytest.mark.parametrize(("fixture", "rest"), [("torch_lm", 1e-3), ("lm", 0.3)])
def test_on_the_default_model(fixture, rest, request):
    """The native head rounds its input to bytes: what that changes is shown as the rest."""
    lm = request.getfixturevalue(fixture)
    generation = lm.generate("The capital of Germany is", max_tokens=2, temperature=0, seed=0)
    for step in generation.steps:
        seen = look(lm, generation, step.position - 1)
        for against in (None, "mean"):
            assert abs(attribution(lm, seen, against=against).rest) < rest
