"""Looking at a position: what is seen is true, nothing later is seen, and nothing changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from helpers import tiny
from unspool.errors import ContextError, SettingsError, UnspoolError
from unspool.lens.activations import get_activations

TOKENS = [1, 40, 77, 3, 200, 11, 90, 54, 8, 130, 33, 2, 61, 7, 99, 25, 180, 14, 73, 5]
FAMILIES = ["llama", "gpt2", "gpt-neox", "gemma3", "gpt-oss", "qwen3-moe", "gemma4-all"]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_causal_and_sums_to_one(family, family_lm):
    lm = family_lm(family)
    config = lm.config
    for position in (0, 5, 19):
        activations = get_activations(lm, TOKENS, position)
        assert activations.attention.shape == (config.layers, config.heads, position + 1)
        attended = activations.attention, activations.attention_by_layer, activations.attention_mean
        for rows in attended:
            assert (rows >= 0).all()
            if config.sinks:  # which take a share of every row
                assert (rows.sum(-1) < 1).all()
            else:
                np.testing.assert_allclose(rows.sum(-1), 1, atol=1e-5)
        for layer in range(config.layers):
            if config.window(layer):  # what lies before the window is not seen either
                before = max(0, position + 1 - config.window(layer))
                assert (activations.attention[layer, :, :before] == 0).all()
        other_ending = [*TOKENS[: position + 1], 250, 251]
        again = get_activations(lm, other_ending, position)
        np.testing.assert_allclose(again.attention, activations.attention, atol=1e-5)
        assert again.picked == 250


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "gemma2", "mixtral"])
def test_attention_and_residuals_are_those_of_transformers(family, family_lm):
    lm, oracle = family_lm(family), tiny.make(family)
    with torch.no_grad():
        outputs = oracle(
            torch.tensor([TOKENS]),
            output_attentions=True,
            output_hidden_states=True,
            use_cache=False,
        )
    for position in (7, 19):
        activations = get_activations(lm, TOKENS, position)
        expected = np.stack([layer[0, :, position, : position + 1] for layer in outputs.attentions])
        np.testing.assert_allclose(activations.attention, expected, atol=2e-5)
        hidden = np.stack([layer[0, position].numpy() for layer in outputs.hidden_states])
        # transformers gives the last one after the final norm
        np.testing.assert_allclose(activations.residuals[:-1], hidden[:-1], atol=2e-4)
        np.testing.assert_allclose(activations.logits, outputs.logits[0, position], atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_add_up_to_the_residuals(family, family_lm):
    activations = get_activations(family_lm(family), TOKENS, 9)
    np.testing.assert_allclose(
        activations.residuals[:-1] + activations.parts.sum(1), activations.residuals[1:], atol=1e-4
    )
    np.testing.assert_allclose(
        activations.norms, np.sqrt((activations.residuals**2).sum(-1)), rtol=1e-5
    )
    assert activations.part_norms.shape == (len(activations.parts), 2)


def test_looking_changes_nothing(tiny_lm):
    lm = tiny_lm
    before = lm.generate([1, 2, 3], max_tokens=30, seed=5)
    with lm.open_branch(TOKENS) as branch:
        lm.engine.extend(branch)  # from now on all but the last token is in the tree
    with lm.open_branch(TOKENS) as branch:
        plain = lm.engine.extend(branch)
    with lm.open_branch(TOKENS) as branch:
        looked = lm.engine.look(branch, at=frozenset({len(TOKENS) - 1})).logits
    np.testing.assert_array_equal(plain, looked)
    pages_before = lm.engine.tree.pool.used
    for position in range(0, 33, 4):
        activations = get_activations(lm, before, position)
        np.testing.assert_array_equal(
            activations.logits, get_activations(lm, before, position).logits
        )
    after = lm.generate([1, 2, 3], max_tokens=30, seed=5)
    assert after.tokens == before.tokens
    logprobs = [step.logprob for step in before.steps]
    assert [step.logprob for step in after.steps] == pytest.approx(logprobs, abs=1e-4)
    assert (
        lm.engine.tree.pool.used <= pages_before + 4
    )  # nothing stays open: only the index keeps pages


def test_looking_costs_nothing_when_off(tiny_lm, monkeypatch):
    looks = []
    backend = tiny_lm.engine.backend
    launch = backend.launch
    monkeypatch.setattr(
        backend, "launch", lambda batch: (looks.append(batch.observe), launch(batch))[1]
    )
    generation = tiny_lm.generate([9, 8, 7], max_tokens=5, seed=1)
    assert looks and all(inside is None for inside in looks)
    looks.clear()
    get_activations(tiny_lm, generation, 6)  # what came before is in the tree: one step, one token
    assert len(looks) == 1 and len(looks[0].residuals) == 1


def test_a_generation_is_looked_at_where_it_was_picked(tiny_lm):
    generation = tiny_lm.generate([4, 5, 6], max_tokens=6, temperature=0)
    for step in generation.steps:
        activations = get_activations(tiny_lm, generation, step.position - 1)
        assert activations.picked == step.token == activations.most_likely
    last = get_activations(tiny_lm, generation)
    assert last.position == 8 and last.picked is None
    assert last.tokens == (4, 5, 6, *generation.tokens)


def test_long_prompts_come_in_chunks(family_lm):
    lm = family_lm("qwen3")
    tokens = [(7 * i) % 259 for i in range(127)]
    activations = get_activations(lm, tokens, 100)
    assert activations.attention.shape[-1] == 101


def test_what_cannot_be_looked_at(tiny_lm):
    for position in (20, -21, 1.5, True, None):
        with pytest.raises(SettingsError, match="position"):
            get_activations(tiny_lm, TOKENS, position)
    with pytest.raises(UnspoolError, match="empty"):
        get_activations(tiny_lm, [], 0)
    with pytest.raises(UnspoolError, match="vocabulary"):
        get_activations(tiny_lm, [5000], 0)
    with pytest.raises(ContextError):
        get_activations(tiny_lm, [1] * 200, 0)


def test_for_json(tiny_lm):
    activations = get_activations(tiny_lm, TOKENS, 3)
    small = json.loads(json.dumps(activations.to_dict()))
    assert len(small["attention_by_layer"]) == small["layers"] == 4
    assert "attention" not in small and len(small["norms"]) == 5
    with_heads = json.loads(json.dumps(activations.to_dict(heads=True)))
    np.testing.assert_allclose(with_heads["attention"], activations.attention, atol=1e-6)


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
def test_recurrent_layers_have_no_attention_but_a_state(family_lm, name: str):
    activations = get_activations(family_lm(name), TOKENS, 3)
    recurrent = [layer for layer in range(4) if layer not in activations.attention_layers]
    assert len(recurrent) == 3 and not activations.attention[recurrent].any()
    np.testing.assert_allclose(activations.attention_mean.sum(), 1, atol=1e-4)
    assert [state["layer"] - 1 for state in activations.states] == recurrent
    for state in json.loads(json.dumps(activations.to_dict()))["states"]:
        assert state["state_norm"] > 0 and state["gate"] > 0
        assert (0 < state["decay"] < 1) == (state["mixer"] == "delta")
    assert "a state instead of attention" in activations._repr_html_()


def test_a_text_is_looked_at(lm):
    activations = get_activations(lm, "The capital of Germany is")
    assert activations.texts[-1] == " is"
    assert (
        activations.most_likely
        == lm.generate(activations.tokens, max_tokens=1, temperature=0).tokens[0]
    )
    np.testing.assert_allclose(activations.attention.sum(-1), 1, atol=1e-4)
