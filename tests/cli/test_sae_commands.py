"""`unspool features` and `unspool train sae`, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.sae_folder import write_saelens
from unspool.lens.sae import load_sae

TEXT = "The tree has one page."


def test_features_of_each_token(unspool: Any, words: Any, tmp_path: Path):
    write_saelens(tmp_path / "sae", "standard", width=words.config.width)
    expected = words.features(TEXT, load_sae(tmp_path / "sae"), top=2)
    arguments = ["features", TEXT, "--sae", str(tmp_path / "sae"), "--top", "2"]
    code, out, _ = unspool(*arguments)
    assert code == 0
    for line, piece, active in zip(out.splitlines(), expected.texts, expected.active, strict=True):
        listed = "  ".join(f"{item.feature}: {item.strength:.2f}" for item in active)
        assert line.startswith(repr(piece)) and line.endswith(listed)
    code, out, _ = unspool(*arguments, "--json")
    assert code == 0 and json.loads(out) == expected.to_dict()
    code, _, err = unspool("features", TEXT, "--sae", str(tmp_path))
    assert code != 0 and "no sparse autoencoder" in err


def test_training_one(unspool: Any, words: Any, tmp_path: Path):
    pytest.importorskip("torch")
    corpus = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": " ".join([TEXT] * 12)}) for _ in range(80)]
    corpus.write_text("\n".join(lines), encoding="utf-8")
    arguments = ["train", "sae", str(corpus), "--out", str(tmp_path / "out"), "--length", "16",
                 "--features", "20"]  # fmt: skip
    arguments += ["--k", "4", "--tokens", "300", "--batch", "64", "--eval", "3"]
    code, out, err = unspool(*arguments, "--layer", "-1", "--json")
    assert code == 0, err
    quality = json.loads(out)
    assert quality["fvu"] >= 0 and 0 < quality["l0"] <= 4
    sae = load_sae(tmp_path / "out")
    assert sae.layer == words.config.layers - 1 and sae.num_features == 20
    assert sae.examples and all(
        example.strength > 0 for places in sae.examples.values() for example in places
    )
    code, _, err = unspool(*arguments, "--layer", "-1")  # complete: only measured again
    assert code == 0 and "loss recovered" in err
    code, _, err = unspool(*arguments, "--layer", "99")
    assert code == 2 and "layer must be from 0 to" in err
    code, _, err = unspool(*arguments, "--layer", "0")
    assert code == 2 and "give a new folder" in err
