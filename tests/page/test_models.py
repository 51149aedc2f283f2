"""The models on this machine: shown, picked, loaded when picked, and what was written stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

import unspool
from helpers.page_actions import branch, finished, tokens, write
from helpers.running_server import default_entry, running
from helpers.tiny_gguf import write_tiny
from unspool.errors import ModelFileError
from unspool.server.runtime.registry import ModelEntry

QUESTION = "Why do leaves change color in fall?"


@pytest.fixture(scope="module")
def several(default_model: Path) -> Iterator[Any]:
    """A server with models of every kind: the default one, another, one of an unknown family,
    a damaged one, and one that is too large."""
    may_load = threading.Event()

    def load() -> Any:
        assert may_load.wait(30)
        return unspool.load(default_model, memory=64 << 20)

    def unknown() -> Any:
        raise ModelFileError("org/unknown: the family 'mamba9' is not supported")

    def damaged() -> Any:
        raise KeyError("tensor")

    entries = [
        default_entry(default_model, memory=64 << 20),
        ModelEntry("org/other", load, 98_000_000, "Ollama"),
        ModelEntry("org/unknown", unknown, 1_200_000_000, "Hugging Face"),
        ModelEntry("damaged", damaged, 5_000_000),
        ModelEntry("huge", load, 1 << 50),
    ]
    with running(entries, drain=0.1) as found:
        found.may_load = may_load
        yield found


@pytest.fixture
def expected_errors() -> list[str]:
    return ["Failed to load resource"]  # what the browser says when a server says no


@pytest.fixture
def address(several: Any) -> str:
    return f"{several.url}/"


def test_a_model_is_picked_and_what_was_written_stays_with_its_own(
    page: Page, several: Any
) -> None:
    write(page, QUESTION, mode="chat", max_tokens=4, seed=7)
    page.locator("#model").click()
    dialog = page.get_by_role("dialog", name="Models on this machine")
    other = dialog.locator("[data-model='org/other']")
    expect(dialog.locator("[data-model='smollm']")).to_contain_text("writes now")
    expect(other).to_contain_text("98 MB · Ollama")
    expect(dialog.locator("[data-model='org/unknown']")).to_contain_text("1.2 GB")
    expect(dialog.get_by_role("button", name="Write with huge")).to_be_disabled()
    expect(dialog.locator("[data-model='huge']")).to_contain_text("larger than the memory")
    other.get_by_role("button", name="Write with org/other").click()
    expect(other.get_by_role("status")).to_contain_text("Loading 98 MB")
    expect(page.locator("#model")).to_contain_text("loading")
    several.may_load.set()
    expect(other).to_contain_text("writes now")
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("#model")).to_contain_text("other")
    assert page.url.endswith("?model=org%2Fother")
    # The text is the first model's, and goes on with it; the next one is the other's.
    notice = page.locator(".other-model")
    expect(notice).to_contain_text("smollm wrote this text")
    page.locator("#go-on").click()
    expect(tokens(page).nth(5)).to_be_visible()
    finished(page)
    before = page.locator("#text").get_attribute("data-branch") or ""
    notice.get_by_role("button", name="Write it anew").click()
    expect(page.locator("#text")).not_to_have_attribute("data-branch", before)
    expect(notice).to_have_count(0)
    finished(page)
    models = {
        told["id"]: told["model"] for told in httpx.get(f"{several.url}/v1/tree").json()["data"]
    }
    assert models[before] == "smollm"
    now = page.locator("#text").get_attribute("data-branch")
    assert models[now or ""] == "org/other"
    # Another visit, the same model.
    page.reload()
    expect(page.locator("#model")).to_contain_text("other")
    expect(page.locator("#text")).to_have_attribute("data-branch", now or "")


@pytest.mark.parametrize(
    ("name", "words"), [("org/unknown", "'mamba9' is not supported"), ("damaged", "cannot be")]
)
def test_a_model_that_cannot_be_loaded_says_why_and_the_page_goes_on(
    page: Page, name: str, words: str
) -> None:
    page.locator("#model").click()
    dialog = page.get_by_role("dialog", name="Models on this machine")
    dialog.get_by_role("button", name=f"Write with {name}").click()
    expect(dialog.locator(f"[data-model='{name}']").get_by_role("alert")).to_contain_text(words)
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("#model")).to_contain_text("smollm")
    write(page, QUESTION, mode="chat", max_tokens=4, seed=7)
    assert branch(page)["model"] == "smollm"


def in_cache(cache: Path, repo: str, files: dict[str, bytes]) -> None:
    """A repository as the hub's library keeps it."""
    home = cache / "hub" / f"models--{repo.replace('/', '--')}"
    folder = home / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    (home / "blobs").mkdir()
    for number, (name, data) in enumerate(files.items()):
        blob = home / "blobs" / str(number)
        blob.write_bytes(data)
        (folder / name).symlink_to(blob)


def test_the_command_offers_what_is_on_the_machine_and_starts_whatever_is_there(
    tmp_path: Path, default_model: Path
) -> None:
    config = json.dumps({"model_type": "mamba9", "architectures": ["Mamba9"]}).encode()
    in_cache(tmp_path, "org/unknown", {"config.json": config, "model.safetensors": b"\0" * 64})
    in_cache(tmp_path, "org/damaged", {"model.gguf": b"GGUF and then nothing"})
    (tmp_path / "hub" / "models--org--empty").mkdir()
    tiny = write_tiny(tmp_path / "tiny.gguf").read_bytes()
    in_cache(tmp_path, "org/tiny", {"tiny.gguf": tiny})
    command = [sys.executable, "-m", "unspool", "page", "--port", "0", "--no-open"]
    process = subprocess.Popen(
        [*command, "--model", str(default_model)],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert found
        end = time.monotonic() + 60
        while True:
            told = httpx.get(f"{found[0]}/v1/models").json()["data"]
            names = [model["id"] for model in told]
            if "org/tiny/tiny.gguf" in names:
                break
            assert time.monotonic() < end, names
            time.sleep(0.1)
        assert [model["unspool"]["loaded"] for model in told].count(True) == 1
        assert not {"org/unknown", "org/damaged", "org/empty"} & set(names)  # what cannot be opened
        answer = httpx.post(f"{found[0]}/v1/models/org/tiny/tiny.gguf/load", timeout=60).json()
        assert answer["unspool"]["loaded"], answer
        assert httpx.post(f"{found[0]}/v1/models/{names[0]}/load", timeout=60).json()["id"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
