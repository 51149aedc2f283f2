"""A view in light and dark, wide and narrow: accessible by axe's rules, and nothing sticks out.

The screenshots are kept in the folder that UNSPOOL_SCREENSHOTS names, to be looked at.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from helpers.page_actions import drawn

READ = {"resultTypes": ["violations"], "preload": False}
# What another theme can break, and what another size cannot.
COLORS = "color-contrast"
ASKED: dict[tuple[str, str], dict[str, Any]] = {
    ("wide", "light"): READ,
    ("wide", "dark"): READ | {"runOnly": [COLORS]},
    ("phone", "light"): READ | {"rules": {COLORS: {"enabled": False}}},
}
SIZES = {"wide": (1280, 800), "phone": (390, 844), "small": (360, 740)}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def check_looks(page: Page, view: str) -> None:
    """In every size and theme."""
    folder = os.environ.get("UNSPOOL_SCREENSHOTS")
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(200)  # what is drawn after a resize
        sideways = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert sideways <= 0, f"{view}, {size}: {sideways} px to scroll sideways"
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            drawn(page)
            if folder:
                name = f"{view}-{size}-{theme}.png"
                page.screenshot(path=Path(folder) / name, full_page=width < 500)
            if (size, theme) not in ASKED:
                continue
            found = Axe().run(page, options=ASKED[size, theme])
            report = f"{view}, {size}, {theme}: {found.generate_report()}"
            assert not found.response["violations"], report
