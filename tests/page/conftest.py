"""A real browser before a real server with a small model; what uses it is marked `browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from helpers.page_actions import WIDE
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
        context = browser.new_context(viewport=WIDE)
        context.add_init_script("localStorage.setItem('unspool.visited', 'true')")  # no example
        self.page = context.new_page()
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
        self.page.set_viewport_size(WIDE)
        self.faults.clear()

    def visit(self, address: str) -> Page:
        self.forget()
        self.page.goto(address)
        return self.page


class Chromium:
    """A browser and a window, for all tests here that come one after another: opening them, and
    reading the page's code for the first time, takes seconds."""

    def __init__(self, executable: str) -> None:
        self.closing = ExitStack()
        chromium = self.closing.enter_context(sync_playwright()).chromium
        self.browser = chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        self.window = Window(self.browser)


_open_browsers: list[Chromium] = []  # one or none


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what opens the browser: a separate job. Slow tests stay in the job of slow tests."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("slow"):
            item.add_marker("browser")


# Not at the end of the session: while Playwright runs, no other test of the thread can use asyncio.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """Before a test without a browser it is closed."""
    yield
    if _open_browsers and "chromium" not in getattr(nextitem, "fixturenames", ()):
        _open_browsers.pop().closing.close()


@pytest.fixture
def chromium() -> Chromium:
    if _open_browsers and not _open_browsers[0].browser.is_connected():  # it crashed
        _open_browsers.pop().closing.close()
    if not _open_browsers:
        executable = next(filter(None, map(shutil.which, _NAMES)), None)
        if executable is None:
            message = "no Chromium here; Debian: apt-get install chromium"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
        _open_browsers.append(Chromium(executable))
    return _open_browsers[0]


@pytest.fixture
def browser(chromium: Chromium) -> Browser:
    return chromium.browser


@pytest.fixture
def window(chromium: Chromium) -> Window:
    return chromium.window


@pytest.fixture
def empty_library(window: Window, address: str) -> None:
    """Nothing that other tests wrote: a new window shows the latest text."""
    window.forget()
    window.page.goto("about:blank")  # the page before would save what it shows
    with httpx.Client(base_url=address) as client:
        for session in client.get("/v1/tree/sessions?limit=1000").json().get("data", []):
            client.delete(f"/v1/tree/sessions/{session['id']}")


@pytest.fixture
def page(
    window: Window, address: str, empty_library: None, expected_errors: list[str]
) -> Iterator[Page]:
    """The page as a person opens it again, with an empty library; no error stays unseen."""
    page = window.visit(address)
    expect(page.locator("#write")).to_be_enabled()
    yield page
    faults = [f for f in window.faults if not any(word in f for word in expected_errors)]
    assert not faults
