"""Sparse autoencoders: files of SAELens and Gemma Scope, the formulas, features and clamping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.sae_folder import SIZE, WIDTH, weights_of, write_saelens
from unspool.errors import ModelFileError, SettingsError
from unspool.lens.sae import feature_examples, features, load_sae

TOKENS = [1, 40, 77, 3, 200, 11]


def expected_strengths(
    architecture: str, w: dict[str, Any], x: Any, *, shifted: bool = True, k: int = 4,
    rescaled: bool = False,
) -> Any:  # fmt: skip
    """The computation of SAELens, in numpy."""
    sae_in = x - w["b_dec"] if shifted else x
    if architecture == "gated":
        gate = sae_in @ w["W_enc"] + w["b_gate"] > 0
        magnitude = np.maximum(sae_in @ (w["W_enc"] * np.exp(w["r_mag"])) + w["b_mag"], 0)
        return gate * magnitude
    pre = sae_in @ w["W_enc"] + w["b_enc"]
    if architecture == "jumprelu":
        return np.maximum(pre, 0) * (pre > w["threshold"])
    if architecture == "topk":
        if rescaled:
            pre = pre * np.linalg.norm(w["W_dec"], axis=-1)
        kept = np.argsort(-pre, axis=-1)[:, :k]
        values = np.zeros_like(pre)
        np.put_along_axis(values, kept, np.maximum(np.take_along_axis(pre, kept, -1), 0), -1)
        return values
    return np.maximum(pre, 0)


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu", "gated"])
def test_the_formulas_of_saelens(architecture: str, shifted: bool, tmp_path: Path):
    options = {"k": 4} if architecture == "topk" else {}
    w = write_saelens(tmp_path, architecture, apply_b_dec_to_input=shifted, **options)
    sae = load_sae(tmp_path)
    x = np.random.default_rng(1).standard_normal((30, WIDTH)).astype(np.float32)
    expected = expected_strengths(architecture, w, x, shifted=shifted)
    strengths = sae.encode(x)
    np.testing.assert_allclose(strengths, expected, atol=1e-4)
    assert 0 < (expected > 0).mean() < 1
    np.testing.assert_allclose(sae.decode(strengths), expected @ w["W_dec"] + w["b_dec"], atol=1e-3)
    assert (sae.site, sae.layer, sae.num_features) == ("resid_post", 1, SIZE)


def test_older_and_newer_topk_folders(tmp_path: Path):
    x = np.random.default_rng(1).standard_normal((30, WIDTH)).astype(np.float32)
    w = write_saelens(tmp_path / "a", "standard", activation_fn_str="topk",
                      activation_fn_kwargs={"k": 4})  # fmt: skip
    old = load_sae(tmp_path / "a")
    np.testing.assert_allclose(old.encode(x), expected_strengths("topk", w, x), atol=1e-4)
    w = write_saelens(tmp_path / "b", "topk", k=4, rescale_acts_by_decoder_norm=True)
    new = load_sae(tmp_path / "b")
    expected = expected_strengths("topk", w, x, rescaled=True)
    np.testing.assert_allclose(new.encode(x), expected, atol=1e-4)
    norms = np.linalg.norm(w["W_dec"], axis=-1)
    np.testing.assert_allclose(
        new.decode(new.encode(x)), (expected / norms) @ w["W_dec"] + w["b_dec"], atol=1e-3
    )


def test_gemma_scope(tmp_path: Path):
    folder = tmp_path / "layer_2" / "width_16k" / "average_l0_71"
    folder.mkdir(parents=True)
    w = weights_of("jumprelu")
    np.savez(folder / "params.npz", **w)
    sae = load_sae(folder)
    assert (sae.site, sae.layer) == ("resid_post", 2)
    x = np.random.default_rng(1).standard_normal((30, WIDTH)).astype(np.float32)
    np.testing.assert_allclose(
        sae.encode(x), expected_strengths("jumprelu", w, x, shifted=False), atol=1e-4
    )


def test_features_of_a_text(tiny_lm, tmp_path: Path):
    w = write_saelens(tmp_path, "standard")
    sae = load_sae(tmp_path)
    read = features(tiny_lm, TOKENS, sae)
    x = tiny_lm.activations(TOKENS, layers=1)["resid_post", 1]
    expected = expected_strengths("standard", w, x)
    for feature in range(SIZE):
        np.testing.assert_allclose(read.strengths(feature), expected[:, feature], atol=1e-3)
    for position, active in enumerate(read.active):
        assert len(active) == (expected[position] > 0).sum()
        strengths = [item.strength for item in active]
        assert strengths == sorted(strengths, reverse=True)
    best = read.strongest(1)[0]
    assert best.strength == pytest.approx(float(expected.max()), abs=1e-3)
    assert all(len(active) <= 2 for active in features(tiny_lm, TOKENS, sae, top=2).active)
    json.dumps(read.to_dict())
    assert "active features" in read._repr_html_()


@pytest.mark.parametrize("architecture", ["standard", "jumprelu", "gated"])
def test_a_clamped_feature_has_its_value(tiny_lm, architecture: str, tmp_path: Path):
    write_saelens(tmp_path, architecture)
    sae = load_sae(tmp_path)
    feature, value = 3, 7.0
    before = tiny_lm.activations(TOKENS, layers=1)["resid_post", 1]
    after = tiny_lm.activations(TOKENS, layers=1, interventions=sae.clamp(feature, value))
    added = (value - sae.encode(before)[:, feature])[:, None] * sae.decoder[feature]
    np.testing.assert_allclose(after["resid_post", 1], before + added, atol=1e-3)
    text = tiny_lm.generate(TOKENS, interventions=sae.clamp(feature, 40.0), max_tokens=4, seed=1)
    assert text.request.interventions


def test_top_examples_of_a_feature(tiny_lm, tmp_path: Path):
    w = write_saelens(tmp_path, "standard")
    sae = load_sae(tmp_path)
    texts = [[(5 * n + k) % 259 for k in range(4 + n % 3)] for n in range(100)]
    examples = feature_examples(tiny_lm, iter(texts), sae, 2, n=5)
    peaks = [
        expected_strengths("standard", w, cache["resid_post", 1])[:, 2]
        for cache in tiny_lm.activations(texts, layers=1)
    ]
    order = sorted(range(100), key=lambda n: -peaks[n].max())[:5]
    assert [example.text_index for example in examples] == order
    for example in examples:
        assert example.strength == pytest.approx(peaks[example.text_index].max(), abs=1e-3)
        assert example.position == peaks[example.text_index].argmax()


def test_bad_folders(tiny_lm, tmp_path: Path):
    with pytest.raises(ModelFileError, match="no sparse autoencoder"):
        load_sae(tmp_path)
    for config, message in (
        ({"architecture": "transcoder"}, "'transcoder' is not supported"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations"),
        ({"architecture": "gated"}, "tensor b_gate is missing"),
        ({"architecture": "topk"}, "k must be an integer"),
        ({"metadata": {}}, "site and layer"),
    ):
        write_saelens(tmp_path / "x", "standard", **config)
        with pytest.raises((ModelFileError, SettingsError), match=message):
            load_sae(tmp_path / "x")
    assert load_sae(tmp_path / "x", site="mlp_out", layer=2).site == "mlp_out"
    (tmp_path / "x" / "cfg.json").write_text("{")
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_sae(tmp_path / "x")
    pickled = tmp_path / "layer_1"
    pickled.mkdir()
    np.savez(pickled / "params.npz", W_enc=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_sae(pickled)
    write_saelens(tmp_path / "y", "standard")
    sae = load_sae(tmp_path / "y")
    with pytest.raises(SettingsError, match="feature must be"):
        sae.clamp(SIZE, 1.0)
