"""Features of tokens by a sparse autoencoder: over HTTP, and clamped by `steer`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.sae_folder import SIZE, write_saelens
from helpers.tree_client import PROMPT, SAMPLING, Tree, tokens
from unspool.errors import SettingsError
from unspool.lens.sae import load_sae, save_examples, strongest_examples

TEXTS = ["We are here", "The sea is old", "You and me"]


@pytest.fixture(scope="module")
def sae(lm: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saes") / "tiny-sae"
    write_saelens(folder, "standard", width=lm.config.width)
    save_examples(folder, strongest_examples(lm, TEXTS, load_sae(folder), 2))
    return load_sae(folder)


@pytest.fixture(scope="module")
def served_sae(server: Any, sae: Any) -> Iterator[Any]:
    """The model of the server has it while these tests run."""
    served_lm = server.state.registry.loaded[server.model].lm
    served_lm.add_autoencoder(sae)
    yield sae
    served_lm._shared.autoencoders = {}


def test_a_server_without_one(tree: Tree, http: Any):
    branch = tree.new()
    answer = http.get(f"/v1/tree/{branch['id']}/features")
    assert answer.status_code == 400 and "--sae" in answer.text


def test_features_of_a_token(tree: Tree, lm: Any, served_sae: Any):
    branch = tree.do("resume", tree.new(max_tokens=4))
    ids = [*lm.prompt_ids(PROMPT), *tokens(branch)]
    at = len(ids) - 2
    reply = tree.see(branch, "features", at=-2, top=3)
    assert reply["at"] == at and reply["sae"] == "tiny-sae" and reply["num_features"] == SIZE
    expected = lm.features(ids, served_sae).active[at]
    assert reply["num_active"] == len(expected)
    for item, feature in zip(reply["features"], expected[:3], strict=True):
        assert item["feature"] == feature.feature
        assert item["strength"] == pytest.approx(feature.strength, rel=1e-4)
        examples = lm.feature_examples(TEXTS, served_sae, feature.feature, n=2)
        assert [e["token"] for e in item["examples"]] == [e.token for e in examples]


def test_a_clamped_feature(tree: Tree, lm: Any, served_sae: Any):
    branch = tree.do("resume", tree.new(max_tokens=4))
    (offer,) = tree.see(branch, "steer")["autoencoders"]
    assert offer == {"name": "tiny-sae", "site": "resid_post", "layer": 1, "num_features": SIZE}
    change = {"feature": 3, "strength": 80.0}
    body = {"at": 0, "max_tokens": 6, "changes": [change]}
    reply = tree.ask("POST", f"/{branch['id']}/steer", json=body)
    written = [step["token"] for step in reply["steps"]]
    ids = lm.prompt_ids(PROMPT)
    clamp = replace(served_sae.clamp(3, 80.0), positions=slice(len(ids) - 1, None))
    options = {**SAMPLING, "max_tokens": 6}
    assert written == lm.generate(ids, interventions=clamp, **options).tokens
    assert written != lm.generate(ids, **options).tokens
    (carried,) = reply["interventions"]
    assert carried["op"]["kind"] == "clamp_feature" and carried["label"] == "feature 3"
    kept = tree.do("steer", branch, keep=True, **body)
    assert tokens(kept) == written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature": SIZE}, "feature must be"),
        ({"feature": -1}, "feature"),
        ({"feature": 1, "sae": "other"}, "there is no sparse autoencoder 'other'"),
        ({"feature": 1, "token": 5}, "exactly one of"),
        ({"token": 5, "sae": "tiny-sae"}, "sae is for"),
    ],
)
def test_bad_changes(tree: Tree, http: Any, served_sae: Any, change: dict[str, Any], message: str):
    branch = tree.new()
    answer = http.post(f"/v1/tree/{branch['id']}/steer", json={"changes": [change]})
    assert answer.status_code == 400 and message in answer.text


def test_bad_questions(tree: Tree, http: Any, served_sae: Any):
    branch = tree.new()
    for query, message in (
        ("at=9999", "at must be"),
        ("sae=other", "there is no sparse autoencoder"),
        ("top=0", "top"),
    ):
        answer = http.get(f"/v1/tree/{branch['id']}/features?{query}")
        assert answer.status_code == 400 and message in answer.text


def test_one_of_another_model(lm: Any, tmp_path: Path):
    write_saelens(tmp_path / "other", "standard", width=lm.config.width + 8)
    with pytest.raises(SettingsError, match="of another model"):
        lm.add_autoencoder(tmp_path / "other")
