"""A real browser before a real server with the default model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import acts
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

_ARGUMENTS = (
    "--no-sandbox",  # tests may run as root, and only ever open pages of this machine
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_NAMES = ("chromium", "chromium-browser", "google-chrome")
expect.set_options(timeout=15_000)  # a machine that does much else at the same time


# A module, not the session: while Playwright runs, no other test of the thread can use asyncio.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        message = "no Chromium here; Debian: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found, args=list(_ARGUMENTS))


@pytest.fixture
def address(server: Any) -> str:
    """Where the page is."""
    return f"{server.url}/"


@pytest.fixture
def expected_errors() -> list[str]:
    """Words of console errors that a test brings about itself."""
    return []


@pytest.fixture
def page(browser: Browser, address: str, expected_errors: list[str]) -> Iterator[Page]:
    """The page as a person opens it, the tour put away; nothing may go wrong in it unseen."""
    opened = acts.opened(browser, "about:blank")
    faults: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error":
            faults.append(f"{message.text} ({message.location.get('url', '')})")

    opened.on("console", heard)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.goto(address)
    expect(opened.locator("#write")).to_be_enabled()
    yield opened
    opened.context.close()
    assert not [fault for fault in faults if not any(word in fault for word in expected_errors)]
