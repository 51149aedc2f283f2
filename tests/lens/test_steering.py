"""Steering vectors: fitted as defined, stored as llama.cpp and repeng store them, and applied."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from unspool.backends.interventions import Add, Intervention
from unspool.errors import ModelFileError, SettingsError, StorageError, UnspoolWarning
from unspool.lens.steering import (
    SteeringVector,
    fit_direction,
    load_steering_vector,
    read_vector_folder,
)

POSITIVE = [[1, 40, 77, 3], [200, 11, 90], [54, 8, 130, 33, 2]]
NEGATIVE = [[1, 41, 70, 9], [201, 12, 91], [55, 9, 131, 30, 4]]
PROMPT = [5, 6, 7, 8]


def vector_of(width: int = 48, layers: tuple[int, ...] = (1, 2), **facts: Any) -> SteeringVector:
    rng = np.random.default_rng(3)
    return SteeringVector({n: rng.standard_normal(width) for n in layers}, **facts)


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_the_mean_difference_of_the_residual_stream(tiny_lm, pool: Any):
    fitted = tiny_lm.steering_vector(POSITIVE, NEGATIVE, layers=[1, 3], pool=pool, name="x")
    for layer in (1, 3):
        means = []
        for texts in (POSITIVE, NEGATIVE):
            rows = [tiny_lm.activations(ids, layers=layer)["resid_post", layer] for ids in texts]
            means.append(np.mean([row[-1] if pool == "last" else row.mean(0) for row in rows], 0))
        np.testing.assert_allclose(fitted.directions[layer], (means[0] - means[1]) / 2, atol=1e-5)
    assert fitted.layers == (1, 3) and fitted.model_hint == "llama" and fitted.name == "x"
    assert fitted.fingerprint == tiny_lm.model.fingerprint()
    default = tiny_lm.steering_vector(POSITIVE, NEGATIVE)
    assert default.layers == (1, 2, 3)  # a control vector has no direction for layer 0


def test_pca_finds_the_direction_of_the_pairs_and_its_sign():
    rng = np.random.default_rng(5)
    direction = rng.standard_normal(32)
    direction /= np.linalg.norm(direction)
    negative = rng.standard_normal((40, 32))
    for sign in (1.0, -1.0):
        strengths = rng.uniform(2, 4, (40, 1))
        positive = negative + sign * strengths * direction + 0.05 * rng.standard_normal((40, 32))
        fitted = fit_direction(positive, negative, "pca")
        cosine = fitted @ direction / np.linalg.norm(fitted)
        assert cosine * sign > 0.99
        np.testing.assert_allclose(np.linalg.norm(fitted), strengths.mean(), rtol=0.02)


def test_arithmetic():
    one, other = vector_of(), vector_of(layers=(2, 3))
    total = one + 2 * other
    assert total.layers == (1, 2, 3)
    np.testing.assert_allclose(
        total.directions[2], one.directions[2] + 2 * other.directions[2], rtol=1e-6
    )
    np.testing.assert_array_equal((one - one).directions[1], np.zeros(48))
    np.testing.assert_allclose((-one / 2).directions[1], -one.directions[1] / 2)
    assert one.at(2).layers == (2,) and one.norms[1] == pytest.approx(
        float(np.linalg.norm(one.directions[1]))
    )
    with pytest.raises(SettingsError, match="no direction for layer 3"):
        one.at([2, 3])
    with pytest.raises(SettingsError, match="widths 48 and 16"):
        one + vector_of(width=16)


# -- files


def test_a_control_vector_as_llama_cpp_reads_it(tmp_path: Path):
    vector = vector_of(layers=(1, 5), model_hint="llama", fingerprint="abc", name="happy")
    vector.save(tmp_path / "happy.gguf")
    reader = GGUFReader(tmp_path / "happy.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "controlvector"
    assert fields["controlvector.model_hint"] == "llama"
    assert fields["controlvector.layer_count"] == 2
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {"direction.1", "direction.5"}
    for layer in (1, 5):  # one axis of float32: anything else is refused there
        tensor = tensors[f"direction.{layer}"]
        assert tensor.tensor_type.name == "F32" and tensor.shape.tolist() == [48]
        np.testing.assert_array_equal(tensor.data, vector.directions[layer])
    again = load_steering_vector(tmp_path / "happy.gguf")
    assert (again.name, again.model_hint, again.fingerprint) == ("happy", "llama", "abc")
    for layer in (1, 5):
        np.testing.assert_array_equal(again.directions[layer], vector.directions[layer])


def test_a_file_of_repeng_is_read(tmp_path: Path):
    """Written as repeng's `ControlVector.export_gguf` does."""
    path = tmp_path / "trippy.gguf"
    directions = {n: np.full(16, n, np.float32) for n in (3, 2, 1)}  # it goes from the last layer
    writer = GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "mistral")
    writer.add_uint32("controlvector.layer_count", len(directions))
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    vector = load_steering_vector(path)
    assert vector.layers == (1, 2, 3) and vector.name == "trippy" and not vector.fingerprint
    np.testing.assert_array_equal(vector.directions[3], directions[3])


def write_gguf(path: Path, architecture: str, tensors: dict[str, Any]) -> None:
    writer = GGUFWriter(path, architecture)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.asarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "tensors", "message"),
    [
        ("llama", {"direction.1": np.ones(4)}, "not a control vector"),
        ("controlvector", {"other": np.ones(4)}, "no tensor direction"),
        ("controlvector", {"direction.0": np.ones(4)}, "layer from 1"),
        ("controlvector", {"direction.1": np.ones((2, 4))}, "shape"),
        ("controlvector", {"direction.1": np.ones(4), "direction.2": np.ones(8)}, "same width"),
        ("controlvector", {"direction.1": [1.0, np.nan]}, "finite"),
    ],
)
def test_bad_files(architecture: str, tensors: Any, message: str, tmp_path: Path):
    write_gguf(tmp_path / "bad.gguf", architecture, tensors)
    with pytest.raises(ModelFileError, match=message):
        load_steering_vector(tmp_path / "bad.gguf")


def test_what_cannot_be_saved(tmp_path: Path):
    with pytest.raises(SettingsError, match="cannot steer layer 0"):
        vector_of(layers=(0, 1)).save(tmp_path / "zero.gguf")
    with pytest.raises(StorageError, match="cannot be written"):
        vector_of().save(tmp_path / "absent" / "v.gguf")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_vectors_has_no_way_out(tmp_path: Path):
    inside = tmp_path / "in"
    inside.mkdir()
    vector_of(name="kind").save(inside / "kind.gguf")
    vector_of(name="secret").save(tmp_path / "secret.gguf")
    (inside / "secret.gguf").symlink_to(tmp_path / "secret.gguf")
    assert list(read_vector_folder(inside)) == ["kind"]
    with pytest.raises(SettingsError, match="no such folder"):
        read_vector_folder(tmp_path / "absent")


# -- the option `steer`


def logits_of(lm: Any, **options: Any) -> Any:
    return lm.activations(PROMPT, sites="logits", **options)["logits"]


def test_steer_is_an_addition_to_the_layers_output(tiny_lm):
    vector = vector_of()
    by_hand = [
        Intervention("resid_post", Add(1.5 * vector.directions[n]), layers=n) for n in (1, 2)
    ]
    steered = logits_of(tiny_lm, steer=[(vector, 1.5)])
    np.testing.assert_allclose(steered, logits_of(tiny_lm, interventions=by_hand), atol=1e-4)
    assert np.abs(steered - logits_of(tiny_lm)).max() > 0.1
    np.testing.assert_allclose(
        logits_of(tiny_lm, steer=[(vector, 1.0), (vector, 0.5)]), steered, atol=1e-4
    )
    np.testing.assert_allclose(logits_of(tiny_lm, steer=[(vector, 0.0)]), logits_of(tiny_lm),
                               atol=1e-5)  # fmt: skip


def test_names_refer_to_loaded_vectors(tiny_lm, tmp_path: Path):
    vector = vector_of(name="happy")
    vector.save(tmp_path / "happy.gguf")
    tiny_lm.load_steering_vector(tmp_path / "happy.gguf")
    assert "happy" in tiny_lm.steering_vectors
    options = {"seed": 3, "max_tokens": 6, "end": False}
    text = tiny_lm.generate(PROMPT, steer={"happy": 2.0}, **options)
    assert text.tokens == tiny_lm.generate(PROMPT, steer=[(vector, 2.0)], **options).tokens
    assert text.tokens != tiny_lm.generate(PROMPT, **options).tokens
    longer = tiny_lm.generate(PROMPT, steer={"happy": 2.0}, **{**options, "max_tokens": 9})
    assert text.resume(max_tokens=3).tokens == longer.tokens  # continued under the same vector


@pytest.mark.parametrize(
    ("steer", "message"),
    [
        ({"absent": 1.0}, "no steering vector 'absent'"),
        ({"kind": "much"}, "strength"),
        ([("kind",)], "must be"),
        (3, "must be"),
        ([(3, 1.0)], "steering vectors or their names"),
        ([(vector_of(width=16), 1.0)], "width 16 and the model 48"),
        ([(vector_of(layers=(1, 9)), 1.0)], "steers layer 9"),
        ({"kind": float("nan")}, "strength"),
    ],
)
def test_bad_steering(tiny_lm, steer: Any, message: str):
    tiny_lm.load_steering_vector(vector_of(name="kind"))
    with pytest.raises(SettingsError, match=message):
        tiny_lm.generate(PROMPT, steer=steer, max_tokens=1)


def test_a_vector_of_other_weights_warns(tiny_lm):
    with pytest.warns(UnspoolWarning, match="other weights"):
        tiny_lm.generate(PROMPT, steer=[(vector_of(fingerprint="f" * 40), 1.0)], max_tokens=1)
    with warnings.catch_warnings(action="error"):
        fingerprint = tiny_lm.model.fingerprint()
        tiny_lm.generate(PROMPT, steer=[(vector_of(fingerprint=fingerprint), 1.0)], max_tokens=1)


def test_fitting_needs_texts(tiny_lm):
    for positive, negative, options, message in (
        ([], NEGATIVE, {}, "positive must be a list"),
        (POSITIVE, "text", {}, "negative must be a list"),
        (POSITIVE, NEGATIVE[:2], {"method": "pca"}, "pairs"),
        (POSITIVE, NEGATIVE, {"method": "magic"}, "method"),
        (POSITIVE, NEGATIVE, {"pool": "max"}, "pool"),
        (POSITIVE, NEGATIVE, {"layers": 7}, "layers"),
    ):
        with pytest.raises(SettingsError, match=message):
            tiny_lm.steering_vector(positive, negative, **options)
