"""Models in the stores of other programs: found, used in place, and never trusted."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers.tiny_gguf import write_tiny
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.hub import find, stores
from unspool.model.hub.find import plan_removal


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home folder."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(stores, "_SHARED_OLLAMA", tmp_path / "shared")
    monkeypatch.setattr(stores.sys, "platform", "linux")
    return tmp_path


def layer(kind: str, digest: str) -> dict[str, Any]:
    return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": 1}


def add_blob(store: Path, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    path = store / "blobs" / f"sha256-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return f"sha256:{digest}"


def add_manifest(store: Path, name: str, content: Any) -> Path:
    path = store / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def add_ollama(store: Path, name: str, model: Path, file_type: str = "F32") -> str:
    """A model as `ollama pull` leaves it."""
    digest = add_blob(store, model.read_bytes())
    config = add_blob(store, json.dumps({"file_type": file_type, "model_family": "llama"}).encode())
    manifest = {
        "schemaVersion": 2,
        "config": {"digest": config},
        "layers": [layer("template", config), layer("model", digest)],
    }
    add_manifest(store, name, manifest)
    return digest


LIBRARY = "registry.ollama.ai/library"


def names(**options: Any) -> dict[str, Any]:
    """All but what comes with Unspool."""
    result = find.cached_models(**options)
    return {model.name: model for model in result if model.source != "shipped"}


def test_ollama(machine: Path) -> None:
    with pytest.raises(UnspoolError, match="ollama has no models"):
        find.find_model("ollama/none")
    store = machine / ".ollama" / "models"
    tiny = write_tiny(machine / "t.gguf")
    add_ollama(store, f"{LIBRARY}/tiny/1b", tiny)
    add_ollama(store, f"{LIBRARY}/other/latest", tiny)
    add_ollama(store, "registry.ollama.ai/somebody/tiny/7b", tiny)
    add_ollama(store, "hf.co/org/name-GGUF/Q4_K_M", tiny)
    result = names()
    assert list(result) == [
        "ollama/hf.co/org/name-GGUF:Q4_K_M",
        "ollama/other:latest",
        "ollama/somebody/tiny:7b",
        "ollama/tiny:1b",
    ]
    model = result["ollama/tiny:1b"]
    assert (model.source, model.kind, model.bytes) == ("ollama", "F32", tiny.stat().st_size)
    assert model.path.parent == store / "blobs" and model.fits
    for name in ("ollama/tiny:1b", "tiny:1b", "TINY:1b", "other", "ollama/other"):
        assert find.find_model(name, offline=True) == model.path
    lm = unspool.load("ollama/tiny:1b", offline=True)
    assert len(lm.generate("hello", max_tokens=3, temperature=0).tokens) == 3
    with pytest.raises(ModelFileError, match=r"did you mean ollama/tiny:1b"):
        find.find_model("ollama/tiny:2b", offline=True)


def test_what_is_wrong_in_ollamas_store_is_told(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = machine / "elsewhere"
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    good = write_tiny(machine / "t.gguf")
    digest = add_ollama(store, f"{LIBRARY}/good/1b", good)
    add_manifest(store, f"{LIBRARY}/torn/1b", '{"layers": [')
    add_manifest(store, f"{LIBRARY}/list/1b", "[]")
    add_manifest(store, f"{LIBRARY}/odd/1b", {"layers": [7, {"mediaType": None}]})
    add_manifest(store, f"{LIBRARY}/deep/1b", "[" * 100_000)
    add_manifest(store, f"{LIBRARY}/gone/1b", {"layers": [layer("model", "sha256:" + "0" * 64)]})
    (machine / "secret").write_bytes(good.read_bytes())
    for number, path in enumerate(("../../secret", "sha256:../../secret", "sha256-" + "a" * 64)):
        add_manifest(store, f"{LIBRARY}/out{number}/1b", {"layers": [layer("model", path)]})
    link = "sha256:" + "1" * 64
    (store / "blobs" / link.replace(":", "-")).symlink_to(machine / "secret")
    add_manifest(store, f"{LIBRARY}/linked/1b", {"layers": [layer("model", link)]})
    tuned = {"layers": [layer("model", digest), layer("adapter", digest)]}
    add_manifest(store, f"{LIBRARY}/tuned/1b", tuned)
    add_ollama(store, f"{LIBRARY}/mamba/1b", write_tiny(machine / "m.gguf", architecture="mamba"))
    packed = write_tiny(machine / "q4.gguf", file_type=33)  # numbers in an order long given up
    add_ollama(store, f"{LIBRARY}/packed/1b", packed, "Q4_0_4_4")
    (machine / "torn.gguf").write_bytes(good.read_bytes()[:200])
    add_ollama(store, f"{LIBRARY}/cut/1b", machine / "torn.gguf")
    assert list(names()) == ["ollama/good:1b"]
    problems = {name: model.problem for name, model in names(include_unusable=True).items()}
    assert len(problems) == 14
    for name, words in {
        "torn": "manifest is unreadable", "list": "manifest", "odd": "not in one GGUF",
        "deep": "manifest", "gone": "missing", "out0": "missing", "out1": "missing",
        "out2": "missing", "linked": "missing", "tuned": "adapter", "mamba": "'mamba'",
        "packed": "Q4_0_4_4", "cut": "GGUF file",
    }.items():  # fmt: skip
        assert words in problems[f"ollama/{name}:1b"], name
    with pytest.raises(ModelFileError, match="adapter"):
        find.find_model("ollama/tuned:1b")


@pytest.mark.skipif(sys.platform == "win32", reason="permissions")
def test_folders_that_may_not_be_read(machine: Path) -> None:
    store = machine / ".ollama" / "models"
    add_ollama(store, f"{LIBRARY}/tiny/1b", write_tiny(machine / "t.gguf"))
    write_tiny(machine / ".cache" / "llama.cpp" / "t.gguf")
    write_tiny(machine / ".lmstudio" / "models" / "o" / "r" / "t.gguf")
    write_tiny(
        machine / ".cache" / "huggingface" / "hub" / "models--o--r" / "snapshots" / "a" / "t"
    )
    assert len(names()) == 3
    machine.chmod(0)
    root = os.geteuid() == 0  # root may read anything: drop privileges
    try:
        if root:
            os.seteuid(65534)
        assert names(include_unusable=True) == {}
    finally:
        if root:
            os.seteuid(0)
        machine.chmod(0o755)
    (store / "blobs").chmod(0)
    try:
        if not root:
            assert len(names()) == 2
    finally:
        (store / "blobs").chmod(0o755)


def test_llama_cpp(machine: Path) -> None:
    cache = machine / ".cache" / "llama.cpp"
    file = write_tiny(cache / "org_some_repo-GGUF_tiny-Q8_0.gguf", file_type=7)
    (cache / "manifest=org=some_repo-GGUF=latest.json").write_text("{}")
    write_tiny(cache / "alone.gguf")
    write_tiny(cache / "split-Q8_0.gguf", file_type=7, parts=3)
    write_tiny(cache / "lost-Q8_0.gguf", parts=3)
    (cache / "lost-Q8_0-00002-of-00003.gguf").unlink()
    write_tiny(cache / "mmproj-tiny.gguf")
    (cache / "half.gguf.downloadInProgress").write_bytes(b"x")
    result = names()
    assert list(result) == ["llama.cpp/alone", "llama.cpp/split-Q8_0", "llama.cpp/tiny-Q8_0"]
    assert result["llama.cpp/tiny-Q8_0"].kind == "Q8_0"
    assert result["llama.cpp/split-Q8_0"].bytes > file.stat().st_size * 9 // 10, "all its parts"
    assert find.find_model("llama.cpp/tiny-Q8_0") == find.find_model("tiny-q8_0") == file
    complete = unspool.load("alone").generate("hello", max_tokens=4, temperature=0).tokens
    assert (
        unspool.load("split-Q8_0").generate("hello", max_tokens=4, temperature=0).tokens == complete
    )
    lost = names(include_unusable=True)["llama.cpp/lost-Q8_0"]
    assert "lost-Q8_0-00002-of-00003.gguf is missing" in lost.problem
    with pytest.raises(ModelFileError, match=r"00002-of-00003\.gguf is missing"):
        unspool.load(lost.path)


def test_lm_studio(machine: Path) -> None:
    home = machine / "studio"
    (machine / ".lmstudio-home-pointer").write_text(f"{home}\n")
    write_tiny(home / "models" / "org" / "a-GGUF" / "a-Q8_0.gguf")
    write_tiny(home / "models" / "org" / "same-GGUF" / "same.gguf")
    write_tiny(home / "models" / "us" / "same-GGUF" / "same.gguf")
    write_tiny(machine / ".cache" / "lm-studio" / "models" / "o" / "old" / "old.gguf")
    outside = write_tiny(machine / "outside" / "linked.gguf")
    (home / "models" / "org" / "a-GGUF" / "linked.gguf").symlink_to(outside)  # lms import does so
    (home / "models" / "org" / "circle").symlink_to(home / "models")
    (home / "models" / "org" / "a-GGUF" / "dead.gguf").symlink_to(machine / "nothing")
    assert list(names()) == [
        "lmstudio/a-Q8_0", "lmstudio/linked", "lmstudio/old",
        "lmstudio/org/same-GGUF/same", "lmstudio/us/same-GGUF/same",
    ]  # fmt: skip
    assert find.find_model("lmstudio/us/same-GGUF/same").parent.parent.name == "us"
    assert find.find_model("lm-studio/a-q8_0").name == "a-Q8_0.gguf"


def test_a_name_in_two_stores(machine: Path) -> None:
    tiny = write_tiny(machine / ".cache" / "llama.cpp" / "same.gguf")
    write_tiny(machine / ".lmstudio" / "models" / "o" / "r" / "same.gguf")
    with pytest.raises(UnspoolError, match=r"give llama\.cpp/same or lmstudio/same"):
        find.find_model("same")
    assert find.find_model("llama.cpp/same") == tiny


def test_the_hubs_cache_and_removing(machine: Path) -> None:
    repo = machine / ".cache" / "huggingface" / "hub" / "models--org--name"
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    for kind in ("Q4_0", "Q8_0"):
        blob = write_tiny(repo / "blobs" / kind)
        (repo / "snapshots" / "abc" / f"m-{kind}.gguf").symlink_to(blob)
    (machine / ".cache" / "huggingface" / "hub" / "models--org--empty").mkdir()
    (machine / ".cache" / "huggingface" / "hub" / "datasets--org--name").mkdir()
    assert list(names()) == ["org/name:Q4_0", "org/name:Q8_0"]
    assert plan_removal("org/name:q4_0").run() > 70_000
    assert list(names()) == ["org/name:Q8_0"] and not (repo / "blobs" / "Q4_0").exists()
    assert plan_removal("hf.co/org/name").run() > 70_000
    assert not repo.exists() and names() == {}
    tiny = write_tiny(machine / ".cache" / "llama.cpp" / "t.gguf")
    with pytest.raises(UnspoolError, match=r"store of llama\.cpp.*deleting the file"):
        plan_removal("t")
    with pytest.raises(UnspoolError, match=r"on this machine: llama\.cpp/t"):
        plan_removal("org/name")
    assert tiny.exists()


def test_folders_of_safetensors_in_the_hubs_cache(machine: Path) -> None:
    from helpers import tiny

    snapshots = machine / ".cache" / "huggingface" / "hub" / "models--org--{}" / "snapshots" / "a"
    complete, cut = (Path(str(snapshots).format(name)) for name in ("whole", "cut"))
    for folder in (complete, cut):
        tiny.save("llama", folder, max_shard_size="60KB")
    shards = sorted(cut.glob("*.safetensors"))
    assert len(shards) > 1
    shards[-1].unlink()
    result = names(include_unusable=True)
    assert result["org/whole"].kind == "F32" and not result["org/whole"].problem
    assert f"{shards[-1].name} is missing" in result["org/cut"].problem
    assert list(names()) == ["org/whole"]


def test_of_huge_stores_only_a_part_is_listed(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_MOST_ENTRIES", 30)
    for number in range(100):
        path = machine / f"r{number % 10}" / f"{number}.gguf"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert 0 < len(stores.walk(machine, 3)) < 30


def test_a_glance_reads_no_vocabulary(machine: Path) -> None:
    from unspool.model.files.gguf import GGUFFile

    observed = GGUFFile(write_tiny(machine / "t.gguf"), glance=True)
    assert observed.metadata["llama.block_count"] == 1 and not observed.tensors
    assert "tokenizer.ggml.tokens" not in observed.metadata
