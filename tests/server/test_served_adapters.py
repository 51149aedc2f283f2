"""Adapters over HTTP: listed, asked for by `model:adapter`, found and replaced while running."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from helpers.running_server import running
from unspool.errors import SettingsError
from unspool.model.adapters import Adapter, LowRank, adaptable_shapes, write_adapter
from unspool.model.files.checkpoint import open_checkpoint
from unspool.server.runtime.registry import AdapterFolder, ModelEntry


def make_adapter(folder: Path, model: Path, seed: int) -> None:
    """A random adapter, strong enough to change what is written."""
    config, draw = open_checkpoint(model).config, np.random.default_rng(seed)
    parts = {
        name: LowRank(
            draw.standard_normal((4, columns)).astype(np.float32) * 0.1,
            draw.standard_normal((rows, 4)).astype(np.float32) * 0.1,
            1.0,
        )
        for name, (rows, columns) in adaptable_shapes(config).items()
        if name.endswith("v.weight")
    }
    write_adapter(Adapter(parts), folder, config)


@pytest.fixture(scope="module")
def adapters(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    outside = tmp_path_factory.mktemp("outside")
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "one", small_model, 1)
    make_adapter(folder / "two", small_model, 2)
    make_adapter(folder / "a name to quote", small_model, 3)
    make_adapter(outside / "three", small_model, 3)
    (folder / "three").symlink_to(outside / "three")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def served(small_entry: ModelEntry, adapters: Path) -> Any:
    entry = replace(small_entry, name="smollm")
    with running([entry], adapters=AdapterFolder(adapters)) as server:
        yield server


def written(server: Any, model: str) -> Any:
    body = {"model": model, "prompt": "the tree", "temperature": 0, "max_tokens": 8, "logprobs": 1}
    return server.http.post("/v1/completions", json=body)


def judged(answer: Any) -> Any:
    """How likely its first word was: another number with any other weights."""
    return answer["choices"][0]["logprobs"]["token_logprobs"][0]


def test_they_are_listed_with_their_model(served: Any) -> None:
    result = served.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in result] == ["smollm", "smollm:one", "smollm:two"]
    assert [model.get("parent") for model in result] == [None, "smollm", "smollm"]


def test_llama_cpp_names_them_by_number(served: Any) -> None:
    """`lora` beside any request, by the ids of `/lora-adapters`."""
    listed = served.http.get("/lora-adapters").json()
    assert [(item["id"], item["path"]) for item in listed] == [(0, "one"), (1, "two")]

    def request_body(path: str, lora: Any, **extra: Any) -> httpx.Response:
        body = {"prompt": "the tree", "max_tokens": 1, "lora": lora, **extra}
        return served.http.post(f"{path}", json=body)

    pair = [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 1.0}]
    for path in ("/completion", "/v1/completions"):
        assert request_body(path, pair).json()["model"] == "smollm:two"
        assert request_body(path, [{"id": 1, "scale": 0.0}]).json()["model"] == "smollm"
        for wrong in ([{"id": 2, "scale": 1}], [{"id": 0, "scale": 0.5}],
                      [{"id": 0, "scale": 1}, {"id": 1, "scale": 1}]):  # fmt: skip
            assert request_body(path, wrong).status_code == 400
    scales = [{"id": 0, "scale": 1.0}]
    refused = served.http.post("/lora-adapters", json=scales)
    assert refused.status_code == 501 and "use `lora`" in refused.json()["error"]["message"]


def test_requests_with_different_adapters_are_answered_together(served: Any) -> None:
    names = ["smollm", "smollm:one", "smollm:two"]
    alone = {name: written(served, name).json() for name in names}
    first = [judged(alone[name]) for name in names]
    assert len(set(first)) == 3
    assert alone["smollm:one"]["model"] == "smollm:one"
    with ThreadPoolExecutor(9) as threads:
        many = list(threads.map(lambda name: written(served, name).json(), names * 3))
    assert [judged(answer) for answer in many] == pytest.approx(first * 3, abs=1e-4)
    texts = [alone[name]["choices"][0]["text"] for name in names]
    assert [answer["choices"][0]["text"] for answer in many] == texts * 3
    assert len({answer["system_fingerprint"] for answer in many}) == 3
    chat = {"messages": [{"role": "user", "content": "the tree"}], "max_tokens": 1}
    answer = served.http.post("/v1/chat/completions", json={"model": "smollm:one", **chat})
    assert answer.json()["model"] == "smollm:one"


@pytest.mark.parametrize(
    "name", ["smollm:three", "smollm:empty", "smollm:none", "smollm:../outside/three", "other:one"]
)
def test_nothing_else_can_be_named(served: Any, name: str) -> None:
    answer = written(served, name)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_a_new_adapter_is_there_and_a_changed_one_replaces_the_old(served, adapters, small_model):
    make_adapter(adapters / "later", small_model, 5)
    first = written(served, "smollm:later").json()
    make_adapter(adapters / "later", small_model, 6)
    second = written(served, "smollm:later").json()
    assert judged(first) != judged(second)
    assert first["system_fingerprint"] != second["system_fingerprint"]


def test_an_adapter_that_cannot_be_loaded_is_said(served, adapters, small_model):
    make_adapter(adapters / "broken", small_model, 7)
    (adapters / "broken" / "adapter_model.safetensors").write_bytes(b"\0" * 16)
    answer = written(served, "smollm:broken")
    assert answer.status_code >= 400
    assert "safetensors" in answer.json()["error"]["message"]
    assert written(served, "smollm:one").status_code == 200


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such folder"):
        AdapterFolder(tmp_path / "nowhere")
