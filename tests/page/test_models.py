"""The models on this machine: shown, picked, loaded when picked, and what was written stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

import unspool
from helpers.page_actions import branch, finished, tokens, write
from helpers.running_server import default_entry, running
from unspool.errors import ModelFileError
from unspool.server.runtime.registry import ModelEntry

QUESTION = "Why do leaves change color in fall?"


@pytest.fixture(scope="module")
def several(small_default: Path) -> Iterator[Any]:
    """A server with models of every kind: the default one, another, one of an unknown family,
    a damaged one, and one that is too large."""
    may_load = threading.Event()

    def load() -> Any:
        assert may_load.wait(30)
        return unspool.load(small_default, memory=16 << 20)

    def unknown() -> Any:
        raise ModelFileError("org/unknown: the family 'mamba9' is not supported")

    def damaged() -> Any:
        raise KeyError("tensor")

    entries = [
        default_entry(small_default, memory=16 << 20),
        ModelEntry("org/other", load, 98_000_000, "Ollama"),
        ModelEntry("org/unknown", unknown, 1_200_000_000, "Hugging Face"),
        ModelEntry("damaged", damaged, 5_000_000),
        ModelEntry("huge", load, 1 << 50),
    ]
    with running(entries, drain=0.1) as result:
        result.may_load = may_load
        yield result


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
    expect(dialog.locator("[data-model='smollm']")).to_contain_text("In use")
    expect(other).to_contain_text("98 MB · Ollama")
    expect(dialog.locator("[data-model='org/unknown']")).to_contain_text("1.2 GB")
    expect(dialog.get_by_role("button", name="Use huge")).to_be_disabled()
    expect(dialog.locator("[data-model='huge']")).to_contain_text("does not fit")
    other.get_by_role("button", name="Use org/other").click()
    expect(other.get_by_role("status")).to_contain_text("Loading 98 MB")
    expect(page.locator("#model")).to_contain_text("loading")
    several.may_load.set()
    expect(other).to_contain_text("In use")
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("#model")).to_contain_text("other")
    assert "model=org%2Fother" in page.url
    # The text belongs to the first model and continues with it; the next one is the other's.
    notice = page.locator(".other-model")
    expect(notice).to_contain_text("smollm wrote this text")
    page.locator("#go-on").click()
    expect(tokens(page).nth(5)).to_be_visible()
    finished(page)
    before = page.locator("#text").get_attribute("data-branch") or ""
    notice.get_by_role("button", name="Rewrite with this model").click()
    expect(page.locator("#text")).not_to_have_attribute("data-branch", before)
    expect(notice).to_have_count(0)
    finished(page)
    models = {
        reply["id"]: reply["model"] for reply in httpx.get(f"{several.url}/v1/tree").json()["data"]
    }
    assert models[before] == "smollm"
    now = page.locator("#text").get_attribute("data-branch")
    assert models[now or ""] == "org/other"
    # Another visit, the same model.
    page.reload()
    expect(page.locator("#model")).to_contain_text("other")
    expect(page.locator("#text")).to_have_attribute("data-branch", now or "")


def test_a_model_that_cannot_be_loaded_says_why_and_the_page_stays_usable(page: Page) -> None:
    page.locator("#model").click()
    dialog = page.get_by_role("dialog", name="Models on this machine")
    reasons = {"org/unknown": "'mamba9' is not supported", "damaged": "cannot be"}
    for name, words in reasons.items():
        dialog.get_by_role("button", name=f"Use {name}").click()
        expect(dialog.locator(f"[data-model='{name}']").get_by_role("alert")).to_contain_text(words)
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("#model")).to_contain_text("smollm")
    write(page, QUESTION, mode="chat", max_tokens=4, seed=7)
    assert branch(page)["model"] == "smollm"
