"""A real browser before a real server with the default model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from helpers import page_actions as acts
from unspool.page import files

_ARGUMENTS = (
    "--no-sandbox",  # tests may run as root, and only ever open pages of this machine
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
# Nothing is kept of the page that is left, nor can it keep anything as it goes.
_FORGET = """() => {
    Storage.prototype.setItem = () => {};
    if (origin !== "null") [sessionStorage, localStorage].forEach((kept) => kept.clear());
}"""
_NAMES = ("chromium", "chromium-browser", "google-chrome")
expect.set_options(timeout=15_000)  # a machine that does much else at the same time


@pytest.fixture(scope="session")
def lm(small_lm: Any) -> Any:
    return small_lm


@pytest.fixture(scope="session")
def server(small_server: Any) -> Any:
    return small_server


@pytest.fixture(scope="session", autouse=True)
def cached_code() -> Iterator[None]:
    """The browser asks for the page's files once, not with every test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(files._HEADERS, "cache-control", "max-age=3600")
        yield


@pytest.fixture
def address(server: Any) -> str:
    """Where the page is."""
    return f"{server.url}/"


@pytest.fixture
def expected_errors() -> list[str]:
    """Words of console errors that a test brings about itself."""
    return []


class Window:
    """A browser window that many tests use: opening a new one takes a second."""

    def __init__(self, browser: Browser) -> None:
        self.page = acts.opened(browser, "about:blank")
        self.faults: list[str] = []
        self.page.on("console", self._record_error)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))

    def _record_error(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.faults.append(f"{message.text} ({message.location.get('url', '')})")

    def forget(self) -> None:
        """Reset the window to a first visit, but for the browser's file cache."""
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.evaluate(_FORGET)
        self.page.emulate_media(color_scheme="light", reduced_motion="no-preference")
        self.page.set_viewport_size(acts.WIDE)
        self.faults.clear()

    def renew(self, address: str) -> None:
        self.forget()
        self.page.goto(address)
        expect(self.page.locator("#write")).to_be_enabled()


class Opened:
    """A browser and a window, for all tests here that come one after another: opening them, and
    reading the page's code for the first time, takes seconds."""

    def __init__(self, executable: str) -> None:
        self.closing = ExitStack()
        chromium = self.closing.enter_context(sync_playwright()).chromium
        self.browser = chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        self.window = Window(self.browser)


_opened: list[Opened] = []  # one or none


# Not at the end of the session: while Playwright runs, no other test of the thread can use asyncio.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """Before a test without a browser it is closed."""
    yield
    if _opened and "opened" not in getattr(nextitem, "fixturenames", ()):
        _opened.pop().closing.close()


@pytest.fixture
def opened() -> Opened:
    if _opened and not _opened[0].browser.is_connected():  # a test that killed it
        _opened.pop().closing.close()
    if not _opened:
        result = next(filter(None, map(shutil.which, _NAMES)), None)
        if result is None:
            message = "no Chromium here; Debian: apt-get install chromium"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
        _opened.append(Opened(result))
    return _opened[0]


@pytest.fixture
def browser(opened: Opened) -> Browser:
    return opened.browser


@pytest.fixture
def window(opened: Opened) -> Window:
    return opened.window


@pytest.fixture
def page(window: Window, address: str, expected_errors: list[str]) -> Iterator[Page]:
    """The page as a person opens it, the tour put away; nothing may go wrong in it unseen."""
    window.renew(address)
    yield window.page
    faults = [f for f in window.faults if not any(word in f for word in expected_errors)]
    assert not faults
