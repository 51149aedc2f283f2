"""Training sparse autoencoders: the steps, the file, resuming, and the quality of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unspool.errors import SettingsError
from unspool.lens.sae import load_sae, measure_sae, ordinary_rows

torch = pytest.importorskip("torch")
sae = pytest.importorskip("unspool.train.sae")

SETTINGS = sae.SaeSettings(
    layer=1, num_features=96, k=6, tokens=1500, batch=128, reuse=20, rate=0.01, length=16,
    pool=4096, num_eval=4, dead_after=400,
)  # fmt: skip


@pytest.fixture(scope="module")
def lm(small_lm: Any) -> Any:
    return small_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    rng = np.random.default_rng(3)
    words = ["sea", "tree", "house", "river", "the", "a", "and", "is", "red", "old", "of", "we"]
    lines = [json.dumps({"text": " ".join(rng.choice(words, 60))}) for _ in range(60)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(lm: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("sae") / "out"
    return folder, sae.train_sae(lm, str(corpus), folder, SETTINGS, device="cpu")


def test_the_reconstruction_learns(trained: tuple[Path, Any], lm: Any):
    folder, quality = trained
    assert quality.fvu < 0.6
    assert 0 < quality.l0 <= SETTINGS.k
    assert quality.tokens == SETTINGS.num_eval * (SETTINGS.length - 1)
    loaded = load_sae(folder)
    assert (loaded.layer, loaded.site, loaded.num_features, loaded.k) == (1, "resid_post", 96, 6)
    np.testing.assert_allclose(np.linalg.norm(loaded.decoder, axis=-1), 1, atol=1e-5)


def test_the_folder_is_that_of_saelens(lm: Any, trained: tuple[Path, Any]):
    folder, _ = trained
    config = json.loads((folder / "cfg.json").read_text())
    assert config["architecture"] == "topk" and config["k"] == 6
    assert config["d_in"] == lm.config.width and config["d_sae"] == 96
    assert config["metadata"]["hook_name"] == "blocks.1.hook_resid_post"


def test_the_file_has_the_trained_function(lm: Any, trained: tuple[Path, Any]):
    """The vectors are scaled in training; the file takes them as they are."""
    folder, _ = trained
    state = sae.SafetensorsFile(folder / "state.safetensors")
    weights = {name: torch.from_numpy(state.stored(name).float32().copy())
               for name in ("encoder", "encoder_bias", "decoder", "decoder_bias")}  # fmt: skip
    scale = json.loads((folder / "training.json").read_text())["scale"]
    x = np.random.default_rng(1).standard_normal((20, lm.config.width)).astype(np.float32)
    _, _, rebuilt, _ = sae.topk_forward(torch.from_numpy(x) * scale, weights, SETTINGS.k)
    loaded = load_sae(folder)
    np.testing.assert_allclose(loaded.decode(loaded.encode(x)), rebuilt / scale, atol=1e-4)


def test_it_resumes(lm: Any, corpus: Path, tmp_path: Path):
    class StopError(Exception):
        pass

    def stop(progress: Any) -> None:
        raise StopError

    settings = replace(SETTINGS, tokens=2500, reuse=2)
    with pytest.raises(StopError):
        sae.train_sae(lm, str(corpus), tmp_path, settings, device="cpu", report=stop)
    before = json.loads((tmp_path / "training.json").read_text())
    assert 0 < before["tokens"] < 2500
    reports: list[Any] = []
    sae.train_sae(lm, str(corpus), tmp_path, settings, device="cpu", report=reports.append)
    assert reports[0].tokens > before["tokens"] and reports[0].steps > before["steps"]
    assert json.loads((tmp_path / "training.json").read_text())["tokens"] >= 2500
    with pytest.raises(SettingsError, match="k 6, and now it is 7"):
        sae.train_sae(lm, str(corpus), tmp_path, replace(settings, k=7), device="cpu")
    (tmp_path / "training.json").unlink()
    with pytest.raises(SettingsError, match="has other files"):
        sae.train_sae(lm, str(corpus), tmp_path, settings, device="cpu")


def test_dead_features_get_a_gradient(tmp_path: Path):
    """Features that no vector has among its k learn from what the others leave."""
    rows = np.random.default_rng(5).standard_normal((256, 16)).astype(np.float32)
    settings = replace(SETTINGS, num_features=64, k=2, dead_after=1, reuse=1, batch=64, pool=256)
    for weight, has_gradient in ((1.0, True), (0.0, False)):
        trainer = sae._Trainer(
            replace(settings, aux_weight=weight), tmp_path / str(weight), "cpu", "model", "texts"
        )
        trainer.add(rows, 1)
        with torch.no_grad():
            trainer._weights["encoder_bias"][:8] = -100.0
        trainer._idle[:8] = 1000
        trainer._optimizer.zero_grad()
        trainer._step(torch.from_numpy(rows[:64]) * trainer._scale)
        gradient = trainer._weights["encoder"].grad[:8]
        # A value below zero has no gradient, so only the features above it can learn.
        assert trainer._idle[:8].min() > 0
        assert bool(gradient.any()) is False
        with torch.no_grad():
            trainer._weights["encoder_bias"][:8] = 0.0
            trainer._weights["encoder"][8:] *= 100.0  # the others have the k places
        trainer._step(torch.from_numpy(rows[:64]) * trainer._scale)
        assert bool(trainer._weights["encoder"].grad[:8].any()) is has_gradient


def test_geometric_median():
    rows = torch.tensor([[0.0, 0.0]] * 5 + [[100.0, 100.0]] * 2)
    np.testing.assert_allclose(sae.geometric_median(rows), [0.0, 0.0], atol=0.05)


def test_quality_of_a_perfect_and_of_an_empty_one(lm: Any, trained: tuple[Path, Any]):
    texts = [lm.prompt_ids("the old house of the sea is red and we"), [5, 6, 7, 8, 9, 10]]
    loaded = load_sae(trained[0])
    width = lm.config.width
    eye = np.eye(width, dtype=np.float32)
    perfect = replace(
        loaded, architecture="standard", k=0, encoder=np.concatenate([eye, -eye]),
        decoder=np.concatenate([eye, -eye]), encoder_bias=np.zeros(2 * width, np.float32),
        decoder_bias=np.zeros(width, np.float32), threshold=np.zeros(2 * width, np.float32),
    )  # fmt: skip
    quality = measure_sae(lm, perfect, texts)
    assert quality.fvu == pytest.approx(0, abs=1e-9) and quality.l0 == pytest.approx(width)
    assert quality.loss_reconstructed == pytest.approx(quality.loss, abs=1e-4)
    assert quality.loss_recovered == pytest.approx(1, abs=1e-3)
    empty = replace(perfect, decoder=np.zeros_like(perfect.decoder))
    quality = measure_sae(lm, empty, texts)
    assert quality.loss_recovered == pytest.approx(0, abs=1e-3)
    assert quality.loss_zero == pytest.approx(quality.loss_reconstructed, abs=1e-4)


def test_sinks_are_left_out():
    rows = np.ones((6, 4), np.float32)
    rows[3] *= 100
    assert ordinary_rows(rows).tolist() == [False, True, True, False, True, True]
