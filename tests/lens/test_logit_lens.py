"""What each layer would have said."""

from __future__ import annotations

import json

import numpy as np
import pytest

from helpers import tiny
from unspool.errors import UnspoolError
from unspool.lens.activations import get_activations
from unspool.lens.logit_lens import logit_lens
from unspool.sampling import log_softmax

TOKENS = [1, 40, 77, 3, 200, 11, 90, 54, 8, 130]


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.NEWEST])
def test_the_last_layer_is_the_model(family, family_lm):
    lm = family_lm(family)
    activations = get_activations(lm, TOKENS, 6)
    lens = logit_lens(lm, activations, full_vocabulary=True)
    expected = log_softmax(activations.logits[None])[0]
    assert len(lens.layers) == lm.config.layers + 1
    assert lens.token == TOKENS[7]
    np.testing.assert_allclose(lens.logprobs[-1], expected, atol=1e-4)
    last = lens.layers[-1]
    assert last.logprob == pytest.approx(expected[TOKENS[7]], abs=1e-4)
    assert last.rank == (expected > expected[TOKENS[7]]).sum()
    assert [c.token for c in last.candidates] == np.argsort(-expected, kind="stable")[:5].tolist()


def test_every_layer_is_a_distribution(tiny_lm):
    activations = get_activations(tiny_lm, TOKENS, 4)
    lens = logit_lens(tiny_lm, activations, top=3, token=17, full_vocabulary=True)
    np.testing.assert_allclose(np.exp(lens.logprobs).sum(-1), 1, atol=1e-5)
    for number, layer in enumerate(lens.layers):
        row = lens.logprobs[number]
        assert layer.layer == number and len(layer.candidates) == 3
        assert layer.probability == pytest.approx(np.exp(row[17]), rel=1e-4)
        assert layer.rank == (row > row[17]).sum()
        assert layer.candidates[0].probability == pytest.approx(np.exp(row.max()), rel=1e-4)
        assert layer.entropy == pytest.approx(-(np.exp(row) * row).sum(), rel=1e-4)


def test_at_the_end_of_a_text_the_likeliest_is_followed(tiny_lm):
    activations = get_activations(tiny_lm, TOKENS)
    lens = logit_lens(tiny_lm, activations, top=0)
    assert lens.token == activations.most_likely
    assert lens.layers[-1].rank == 0 and lens.layers[-1].candidates == ()
    assert lens.logprobs is None


def test_candidates_beyond_the_vocabulary_and_bad_settings(tiny_lm):
    activations = get_activations(tiny_lm, TOKENS)
    assert len(logit_lens(tiny_lm, activations, top=10_000).layers[0].candidates) == 259
    for options in ({"top": -1}, {"top": 1.5}, {"token": 259}, {"token": -1}, {"token": "x"}):
        with pytest.raises(UnspoolError):
            logit_lens(tiny_lm, activations, **options)


def test_for_json(tiny_lm):
    lens = logit_lens(tiny_lm, get_activations(tiny_lm, TOKENS, 3), full_vocabulary=True)
    decoded = json.loads(json.dumps(lens.to_dict()))
    assert decoded["token"] == 200 and len(decoded["layers"]) == 5
    assert decoded["layers"][4]["candidates"][0].keys() >= {"token", "text", "logprob"}


@pytest.mark.real
def test_the_default_model_comes_to_its_answer(lm):
    generation = lm.generate("The capital of Germany is", max_tokens=1, temperature=0, seed=0)
    lens = logit_lens(lm, get_activations(lm, generation, len(generation.prompt) - 1))
    assert lens.text == generation.steps[0].text
    assert lens.layers[-1].rank == 0
    assert lens.layers[-1].logprob == pytest.approx(generation.steps[0].logprob, abs=1e-4)
