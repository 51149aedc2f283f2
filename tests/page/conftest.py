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


class Window:
    """One browser window for a module's tests: opening a new one takes a second."""

    def __init__(self, browser: Browser) -> None:
        self.page = acts.opened(browser, "about:blank")
        self.faults: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.faults.append(f"{message.text} ({message.location.get('url', '')})")

    def renew(self, address: str) -> None:
        """As if nobody had been here before, but for the files that the browser keeps."""
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.goto(f"{address}page/icon.svg")  # the same origin, without the page's code
        self.page.evaluate("() => { sessionStorage.clear(); localStorage.clear(); }")
        self.page.emulate_media(color_scheme="light", reduced_motion="no-preference")
        self.page.set_viewport_size(acts.WIDE)
        self.faults.clear()
        self.page.goto(address)
        expect(self.page.locator("#write")).to_be_enabled()


@pytest.fixture(scope="module")
def window(browser: Browser) -> Iterator[Window]:
    found = Window(browser)
    yield found
    found.page.context.close()


@pytest.fixture
def page(window: Window, address: str, expected_errors: list[str]) -> Iterator[Page]:
    """The page as a person opens it, the tour put away; nothing may go wrong in it unseen."""
    window.renew(address)
    yield window.page
    faults = [f for f in window.faults if not any(word in f for word in expected_errors)]
    assert not faults
