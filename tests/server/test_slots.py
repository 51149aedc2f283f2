"""llama.cpp's slot save and restore: the text continues without prefill, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.recurrent_texts import checkpoint
from helpers.running_server import running
from unspool.backends.cpu.model import CpuModel
from unspool.lm import LanguageModel
from unspool.server.runtime.registry import ModelEntry

PROMPT = "The old lighthouse keeper climbed the stairs every evening " * 3
BODY = {"prompt": PROMPT, "n_predict": 9, "temperature": 0, "ignore_eos": True}


def recurrent_entry(lm: Any) -> ModelEntry:
    """A model with recurrent layers and the vocabulary of another one."""
    size = lm.config.vocab_size
    model = CpuModel(checkpoint("delta", vocab_size=size), store=None, threads=1, kv_bits=16)
    tokenizer = lm.tokenizer
    return ModelEntry("r", lambda: LanguageModel(model, tokenizer, memory=8 << 20), 1000)


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_a_saved_slot_is_restored_after_a_restart(
    kind: str, small_entry: ModelEntry, tiny_vocabulary: Any, tmp_path: Path
):
    entry = small_entry if kind == "attention" else recurrent_entry(tiny_vocabulary)
    with running([entry], slots=tmp_path) as server:
        ask = server.http.post
        first = ask("/completion", json={**BODY, "id_slot": 3}).json()
        saved = ask("/slots/3?action=save", json={"filename": "a.bin"}).json()
        num_tokens = first["tokens_evaluated"] + 9 - 1
        assert saved["id_slot"] == 3 and saved["filename"] == "a.bin"
        assert saved["n_saved"] == num_tokens and saved["timings"]["save_ms"] > 0
        assert saved["n_written"] == (tmp_path / "a.bin").stat().st_size
        longer = {**BODY, "prompt": PROMPT + first["content"]}
        expected = ask("/completion", json=longer).json()
    with running([entry], slots=tmp_path) as server:
        ask = server.http.post
        restored = ask("/slots/0?action=restore", json={"filename": "a.bin"}).json()
        assert restored["n_restored"] == num_tokens and restored["id_slot"] == 0
        assert restored["n_read"] == saved["n_written"] and restored["timings"]["restore_ms"] > 0
        again = ask("/completion", json=longer).json()
        assert again["content"] == expected["content"]
        if kind == "attention":
            assert again["timings"]["cache_n"] >= first["tokens_evaluated"] - 2
        assert ask("/slots/0?action=save", json={"filename": "b.bin"}).status_code == 200
        assert ask("/slots/0?action=erase").json()["n_erased"] >= num_tokens
        assert ask("/slots/0?action=save", json={"filename": "b.bin"}).status_code == 400


def test_no_file_outside_the_folder_and_none_that_is_damaged(small_entry: Any, tmp_path: Path):
    folder = tmp_path / "slots"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "torn").write_bytes(b"unspool kv 3\n" + b"\0" * 40)
    with running([small_entry], slots=folder) as server:
        server.http.post("/completion", json={**BODY, "id_slot": 0})
        for action in ("save", "restore"):
            for name in ("../secret", "/etc/passwd", "..", ".", "a/b", "a\\b", ".x", "link", "",
                         "x" * 300, "a\0b"):  # fmt: skip
                answer = server.http.post(f"/slots/0?action={action}", json={"filename": name})
                assert answer.status_code == 400, (action, name)
        for name in ("torn", "missing"):
            answer = server.http.post("/slots/0?action=restore", json={"filename": name})
            assert answer.status_code == 400 and name in answer.json()["error"]["message"]
        for path in ("/slots/0?action=fly", "/slots/64?action=save", "/slots/-1?action=save"):
            assert server.http.post(path, json={"filename": "a"}).status_code == 400
        assert sorted(path.name for path in folder.iterdir()) == ["link", "torn"]
    with running([small_entry]) as server:
        assert server.http.post("/slots/0?action=save", json={"filename": "a"}).status_code == 501


def test_each_key_has_slots_of_its_own(small_entry: Any, tmp_path: Path):
    with running([small_entry], slots=tmp_path, api_keys=("key-of-alice", "key-of-bob")) as server:

        def ask(key: str, path: str, body: Any) -> Any:
            return server.http.post(path, json=body, headers={"x-api-key": key})

        assert ask("key-of-alice", "/completion", {**BODY, "id_slot": 0}).status_code == 200
        name = {"filename": "a.bin"}
        assert ask("key-of-bob", "/slots/0?action=save", name).status_code == 400  # it has no text
        assert ask("key-of-alice", "/slots/0?action=save", name).status_code == 200
        assert ask("key-of-bob", "/slots/0?action=restore", name).status_code == 400
        assert ask("key-of-bob", "/slots/0?action=erase", {}).json()["n_erased"] == 0
        assert ask("key-of-alice", "/slots/0?action=erase", {}).json()["n_erased"] > 0
        assert ask("key-of-alice", "/slots/0?action=restore", name).status_code == 200


@pytest.fixture(scope="module")
def tiny_vocabulary(small_entry: ModelEntry) -> Any:
    with small_entry.load() as lm:
        yield lm
