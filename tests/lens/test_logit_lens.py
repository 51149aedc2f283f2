"""What each layer would have said."""

from __future__ import annotations

import json

import numpy as np
import pytest

from unspool.errors import ModelFileError, SettingsError, UnspoolError
from unspool.lens import activations
from unspool.lens.activations import get_activations
from unspool.lens.embeddings import embedding, neighbours
from unspool.lens.logit_lens import logit_lens
from unspool.sampling import log_softmax

TOKENS = [1, 40, 77, 3, 200, 11, 90, 54, 8, 130]
FAMILIES = ["llama", "gpt2", "gpt-neox", "gemma3", "gpt-oss", "qwen3-moe", "gemma4-all"]


@pytest.mark.parametrize("family", FAMILIES)
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


def test_a_model_comes_to_its_answer(lm):
    generation = lm.generate("The capital of Germany is", max_tokens=1, temperature=0, seed=0)
    lens = logit_lens(lm, get_activations(lm, generation, len(generation.prompt) - 1))
    assert lens.text == generation.steps[0].text
    assert lens.layers[-1].rank == 0
    assert lens.layers[-1].logprob == pytest.approx(generation.steps[0].logprob, abs=1e-4)


def test_the_mean_of_the_final_vectors(tiny_lm, monkeypatch):
    from unspool.lens import embeddings as module

    monkeypatch.setattr(module, "_CHUNK_TOKENS", 32)
    ids = [(7 * n) % 50 + 1 for n in range(100)]  # more than one chunk
    result = embedding(tiny_lm, ids)
    final = [
        tiny_lm.model.normed(get_activations(tiny_lm, ids, n).residuals[-1][None])[0]
        for n in range(100)
    ]
    mean = np.mean(final, axis=0, dtype=np.float64)
    assert np.allclose(result, mean / np.linalg.norm(mean), atol=1e-5)
    assert abs(np.linalg.norm(result) - 1) < 1e-6


def test_a_look_for_vectors_alone_beside_a_whole_one(tiny_lm):
    """In one batch, each gets what it asked for."""
    engine = tiny_lm.engine
    with tiny_lm.open_branch([1, 2, 3]) as branch, tiny_lm.open_branch([1, 2, 4]) as other:
        (shallow,) = engine.look(branch, at=frozenset({0, 1, 2}), deep=False).inside
        (deep,) = engine.look(other, at=frozenset({1, 2})).inside
    assert shallow.residuals.shape[1] == 3 and not shallow.attention
    assert deep.residuals.shape[1] == 2 and len(deep.attention) == 2
    assert np.allclose(shallow.residuals[:, 1], deep.residuals[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows_at_once", [7, 4096])
def test_as_by_brute_force(tiny_lm, monkeypatch, rows_at_once):
    monkeypatch.setattr(activations, "_CHUNK_ROWS", rows_at_once)
    table = tiny_lm.transformer.embed.weight.detach().double().numpy()
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    cosines = unit @ unit[42]
    cosines[42] = -2
    result = neighbours(tiny_lm, 42, 12)
    assert [near.token for near in result] == np.argsort(-cosines)[:12].tolist()
    assert [near.similarity for near in result] == pytest.approx(np.sort(cosines)[::-1][:12])
    assert result[0].to_dict().keys() == {"token", "text", "similarity"}


def test_tokens_without_direction_are_near_to_nothing(family_lm):
    lm = family_lm("smollm3")
    table = lm.transformer.embed.weight.data
    row_before = table[5].clone()
    table[5] = 0
    try:
        result = neighbours(lm, 5, 3)
        assert [near.similarity for near in result] == [0, 0, 0]
        assert all(np.isfinite(near.similarity) for near in neighbours(lm, 6, 300))
    finally:
        table[5] = row_before


def test_all_but_itself_at_the_most(tiny_lm):
    result = neighbours(tiny_lm, 3, 100_000)
    assert len(result) == 258 and 3 not in {near.token for near in result}
    assert neighbours(tiny_lm, 3, 0) == ()


def test_what_has_no_neighbours(tiny_lm):
    for token in (-1, 259, True, 1.0):
        with pytest.raises(SettingsError, match="vocabulary"):
            neighbours(tiny_lm, token)
    with pytest.raises(SettingsError, match="count"):
        neighbours(tiny_lm, 1, -1)
    with pytest.raises(ModelFileError, match="no tokenizer"):
        neighbours(tiny_lm, "text without a vocabulary")


def test_a_token_is_named_by_its_text(lm):
    token = lm.single_token(" king")
    assert neighbours(lm, " king", 20) == neighbours(lm, token, 20)
    with pytest.raises(SettingsError, match=r"2 tokens|3 tokens|4 tokens"):
        neighbours(lm, "unspooling")
    with pytest.raises(SettingsError, match="0 tokens"):
        neighbours(lm, "")
