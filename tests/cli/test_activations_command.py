"""`unspool activations`, `vector`, `lens`, `patch`, `attribute` and `--steer`, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool as package
from unspool.cli.activations import parse_layers
from unspool.errors import SettingsError
from unspool.lens.steering import SteeringVector, load_steering_vector
from unspool.model.files.safetensors import SafetensorsFile

TEXTS = ["The tree has one page.", "A branch is a path of the tree.", "The red row is in a page."]
WIDTH = 48


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    return path


def test_activations_of_a_file(unspool: Any, words: Any, corpus: Path, tmp_path: Path):
    arguments = ["activations", str(corpus), str(tmp_path / "out"), "--sites",
                 "resid_post,blocks.0.hook_mlp_out", "--layers", "1"]  # fmt: skip
    code, out, err = unspool(*arguments)
    assert code == 0 and out == "" and "3 texts" in err and "1 shard" in err
    shard = SafetensorsFile(tmp_path / "out" / "shard-00000.safetensors")
    assert {"blocks.1.hook_resid_post", "blocks.0.hook_mlp_out", "token"} <= set(shard.tensors)
    expected = np.concatenate(
        [words.activations(text, layers=1)["resid_post", 1] for text in TEXTS]
    )
    states = shard.stored("blocks.1.hook_resid_post").float32()
    np.testing.assert_allclose(states, expected, atol=1e-4)
    assert unspool(*arguments)[0] == 0  # complete: nothing is left to do
    code, _, err = unspool(*arguments[:-1], "0")
    assert code == 2 and "layers" in err


def test_a_vector_is_fitted_saved_and_steers(unspool: Any, words: Any, tmp_path: Path):
    positive, negative = tmp_path / "positive.txt", tmp_path / "negative.txt"
    positive.write_text("The red row\nThe red page\n")
    negative.write_text("The blue row\nThe blue page\n")
    file = tmp_path / "red.gguf"
    code, _, err = unspool("vector", str(positive), str(negative), str(file), "--layers", "1")
    assert code == 0 and "1 layer, width 48" in err
    vector = load_steering_vector(file)
    expected = words.steering_vector(
        ["The red row", "The red page"], ["The blue row", "The blue page"], layers=[1]
    )
    np.testing.assert_allclose(vector.directions[1], expected.directions[1], atol=1e-4)
    arguments = ["The tree", "--raw", "-n", "8", "-t", "0", "-q"]
    for option, steer in ((f"{file}=4", [(vector, 4.0)]), (f"{file}", [(vector, 1.0)])):
        text = words.generate("The tree", max_tokens=8, temperature=0, steer=steer).text
        assert unspool(*arguments, "--steer", option)[1] == text + "\n"
    strong = SteeringVector({1: 40 * np.ones(WIDTH)}, name="strong")
    words.load_steering_vector(strong)
    plain = unspool(*arguments)[1]
    assert unspool(*arguments, "--steer", "strong=-2.5")[1] != plain
    for option, message in (("strong=much", "NAME=STRENGTH"), ("absent=1", "'absent'")):
        code, _, err = unspool(*arguments, "--steer", option)
        assert code == 2 and message in err


def test_patching_prints_a_table(unspool: Any, words: Any):
    texts = ["The red row", "The blue row"]
    ids = [words.tokenizer.encode_prompt(text) for text in texts]
    assert len(ids[0]) == len(ids[1])
    arguments = ["patch", *texts, "--answer", " the", "--other", " of"]
    code, out, _ = unspool(*arguments)
    lines = out.splitlines()
    assert code == 0 and "resid_post is patched" in lines[0]
    assert lines[-2].startswith("layer 0") and lines[-1].startswith("layer 1")
    assert lines[-1].endswith("+1.00")  # the last layer at the last position is the clean run
    sweep = words.patch(*texts, answer=" the", other=" of", progress=False)
    code, out, _ = unspool(*arguments, "--json")
    assert json.loads(out) == sweep.to_dict()
    code, out, _ = unspool(*arguments, "--site", "head_out", "--sweep", "layer,position,head")
    assert code == 0 and len(out.splitlines()) == 21  # a list of the strongest cells
    code, _, err = unspool("patch", "The red row", "The tree", "--answer", " the")
    assert code == 2 and "same number of tokens" in err


def test_a_lens_is_fitted_and_saved(unspool: Any, words: Any, corpus: Path, tmp_path: Path):
    file = tmp_path / "tuned.safetensors"
    code, out, err = unspool("lens", str(corpus), str(file), "--rank", "8")
    assert code == 0 and out == "" and "tuned lens of rank 8" in err
    fitted = words.fit_lens(TEXTS, rank=8, progress=False)
    loaded = words.load_lens(file)
    np.testing.assert_allclose(loaded.bias, fitted.bias, atol=1e-5)
    assert loaded.num_tokens == fitted.num_tokens
    code, _, err = unspool("lens", str(corpus), str(file), "--kind", "round")
    assert code == 2 and "kind must be tuned or jacobian" in err
    code, _, err = unspool("lens", str(corpus), str(file), "--kind", "jacobian")
    assert code == 2 and "backend='torch'" in err  # of the loaded model, which is another one


@pytest.fixture(scope="module")
def torch_words(words_folder: Path) -> Any:
    return package.load(words_folder, backend="torch", memory=8 << 20)


def test_gradients_on_the_command_line(
    torch_words: Any, unspool: Any, monkeypatch: pytest.MonkeyPatch
):
    lm = torch_words
    monkeypatch.setattr("unspool.loading.load", lambda *args, **options: lm)
    arguments = ["attribute", "The red row", "--token", " the", "--steps", "8"]
    code, out, _ = unspool(*arguments, "--json")
    expected = lm.token_attribution("The red row", token=" the", steps=8)
    values = [item["value"] for item in json.loads(out)["values"]]
    assert code == 0
    np.testing.assert_allclose(values, [item.value for item in expected.values], atol=1e-5)
    code, out, _ = unspool(*arguments)
    assert code == 0 and len(out.splitlines()) == len(values) + 2
    texts = ["The red row", "The blue row"]
    code, out, _ = unspool("patch", *texts, "--answer", " the", "--approximate", "--json")
    sweep = lm.patch(*texts, answer=" the", approximate=True, progress=False)
    np.testing.assert_allclose(json.loads(out)["values"], sweep.values, atol=1e-5)
    assert json.loads(out)["is_estimate"]


def test_layer_numbers():
    assert parse_layers(None) is None
    assert parse_layers("5") == [5] and parse_layers("3, 5-7") == [3, 5, 6, 7]
    for text in ("", "a", "3-", "7-5"):
        with pytest.raises(SettingsError, match="--layers"):
            parse_layers(text)
