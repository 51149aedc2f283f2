"""A view in light and dark, wide and narrow: accessible by axe's rules, and nothing sticks out.

The screenshots are kept in the folder that UNSPOOL_SCREENSHOTS names, to be looked at.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

from helpers.page_actions import next_frames, until

READ = {"resultTypes": ["violations"], "preload": False}
COLORS_ONLY = READ | {"runOnly": ["color-contrast"]}  # what another theme can break
CHECKS: dict[tuple[str, str], dict[str, Any]] = {
    ("wide", "light"): READ,
    ("wide", "dark"): COLORS_ONLY,
    ("phone", "light"): READ,
    ("phone", "dark"): COLORS_ONLY,
}
SIZES = {"wide": (1280, 800), "phone": (390, 844), "small": (360, 740)}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
VIOLATIONS = """async ([part, options]) => (await axe.run(part, options)).violations.map(
    ({ id, help, nodes }) => [id, help, nodes.map((node) => node.html).slice(0, 3)])"""


def axe_violations(page: Page, options: dict[str, Any], part: str = "html") -> list[Any]:
    """What axe reports on a part of the page; its code is loaded once by each open page."""
    if page.evaluate("typeof axe === 'undefined'"):
        page.evaluate(AXE_SCRIPT)
    violations: list[Any] = page.evaluate(VIOLATIONS, [part, options])
    return violations


def check_looks(page: Page, view: str, part: str = "html") -> None:
    """In every size and theme; axe looks at `part`, where the rest has been looked at before."""
    folder = os.environ.get("UNSPOOL_SCREENSHOTS")
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        next_frames(page)
        until(page, "document.documentElement.scrollWidth <= innerWidth")
        for theme in THEMES:
            if not folder and (size, theme) not in CHECKS:
                continue
            page.emulate_media(color_scheme=theme)
            next_frames(page)
            if folder:
                name = f"{view}-{size}-{theme}.png"
                page.screenshot(path=Path(folder) / name, full_page=width < 500)
            if (size, theme) in CHECKS:
                violations = axe_violations(page, CHECKS[size, theme], part)
                assert not violations, f"{view}, {size}, {theme}: {violations}"
