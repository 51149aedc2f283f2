"""A view in light and dark, wide and narrow: accessible by axe's rules, and nothing sticks out.

The screenshots are kept in the folder that UNSPOOL_SCREENSHOTS names, to be looked at.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from acts import drawn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

READ = {"resultTypes": ["violations"]}
SIZES = {"wide": (1280, 800), "phone": (390, 844), "small": (360, 740)}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def check_looks(page: Page, view: str) -> None:
    """In every size and theme."""
    folder = os.environ.get("UNSPOOL_SCREENSHOTS")
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(200)  # what is drawn after a resize
        sideways = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert sideways <= 0, f"{size}: {sideways} px to scroll sideways"
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            drawn(page)
            asked = size == "wide" or (size, theme) == ("phone", "light")  # colors are any size's
            if folder:
                name = f"{view}-{size}-{theme}.png"
                page.screenshot(path=Path(folder) / name, full_page=width < 500)
            if not asked:
                continue
            found = Axe().run(page, options=READ)
            assert not found.response["violations"], f"{size} {theme}: {found.generate_report()}"
