"""Every view in light and dark, wide and narrow: accessible by axe's rules, and nothing sticks out.

The screenshots are kept in the folder that UNSPOOL_SCREENSHOTS names, to be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from acts import adopt, open_panel, post, tokens, write
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

QUESTION = "Why do leaves change color in fall?"


def nothing(page: Page) -> None:
    page.locator("#prompt").focus()


def panel(name: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        write(page, QUESTION, mode="chat", max_tokens=30, seed=7)
        tokens(page).nth(8).click()
        open_panel(page, name)

    return act


def branches(page: Page) -> None:
    panel("Step")(page)
    page.locator("#side-panel .candidate:not(.picked)").first.click()
    expect(page.locator("#pause")).to_have_count(0)
    open_panel(page, "Map")


def tokens_view(page: Page) -> None:
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.locator("textarea").first.fill(f"{QUESTION} 🍁 12345")


def compare_view(page: Page) -> None:
    page.locator("#prompt").fill(QUESTION)
    page.get_by_role("button", name="Compare", exact=True).click()
    view = page.get_by_role("region", name="Compare")
    view.get_by_label("Tokens", exact=True).fill("30")
    view.get_by_role("button", name="Write all").click()
    expect(view.get_by_role("button", name="Stop")).to_have_count(0, timeout=60_000)


def shared(page: Page) -> None:
    panel("Step")(page)
    page.get_by_role("button", name="Share").click()
    expect(page.get_by_role("dialog")).to_be_visible()


VIEWS: dict[str, Callable[[Page], None]] = {
    "first": nothing,
    "step": panel("Step"),
    "inside": panel("Inside"),
    "map": branches,
    "costs": panel("Costs"),
    "settings": panel("Settings"),
    "tokens": tokens_view,
    "compare": compare_view,
    "share": shared,
}
# Both themes and both sizes of every view are pictured; axe reads two of the four.
LOOKS = {
    "light-wide": ("light", 1280, 800),
    "dark-wide": ("dark", 1280, 800),
    "light-narrow": ("light", 360, 740),
    "dark-narrow": ("dark", 360, 740),
}
READ_BY_AXE = ("light-wide", "dark-narrow")


STRANGE = "\n\n   \t\t\u200b\u00a0 \ufeff 你好 👩‍👩‍👧 " + "Donaudampfschifffahrt" * 9 + "\n \n"


def strange_branches(page: Page) -> list[str]:
    """A prompt and texts of blanks, invisible and wide characters, and a word that never ends."""
    first = post(page, "", prompt=" \n\u200b", seed=1)["id"]
    post(page, f"/{first}/append", text=STRANGE)
    made = [first]
    for at, words in ((3, "  "), (0, "\n"), (0, "\u200b")):
        made.append(post(page, f"/{first}/choose", at=at, text=words)["id"])
    adopt(page, made, first)
    return made


def strange_panel(name: str, token: int) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        strange_branches(page)
        page.locator("#text .t").nth(token).click(force=True)
        open_panel(page, name)

    return act


def strange_beside(page: Page) -> None:
    made = strange_branches(page)
    open_panel(page, "Map")
    page.get_by_label("Compare with").select_option(made[1])
    expect(page.get_by_role("region", name="Two branches side by side")).to_be_visible()


def strange_comparison(picture: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        made = strange_branches(page)
        page.get_by_role("button", name="Compare", exact=True).click()
        expect(page.get_by_role("region", name="Compare")).to_be_visible()
        page.evaluate(
            """async ([ids, picture]) => {
                const { change, compare } = await import("/page/code/compare/runs.js");
                const { ensureSteps } = await import("/page/code/actions.js");
                for (const id of ids) await ensureSteps(id);
                compare.columns.forEach((column, at) => Object.assign(column, { id: ids[at] }));
                Object.assign(compare.samples, { root: ids[0], ids });
                change({ picture });
            }""",
            [made, picture],
        )
        expect(page.locator(".cmp-text .t").first).to_be_attached()

    return act


VIEWS |= {
    "strange-step": strange_panel("Step", 5),
    "strange-inside": strange_panel("Inside", 5),
    "strange-map": strange_panel("Map", 5),
    "strange-costs": strange_panel("Costs", 5),
    "strange-beside": strange_beside,
    "strange-columns": strange_comparison("settings"),
    "strange-samples": strange_comparison("samples"),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_accessible_and_fits(page: Page, view: str) -> None:
    VIEWS[view](page)
    page.wait_for_load_state("networkidle")
    for look, (theme, width, height) in LOOKS.items():
        folder = os.environ.get("UNSPOOL_SCREENSHOTS")
        if look not in READ_BY_AXE and not folder:
            continue
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(300)  # what is drawn after a resize
        if folder:
            narrow = width < 500
            page.screenshot(path=Path(folder) / f"{view}-{look}.png", full_page=narrow)
        sideways = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert sideways <= 0, f"{look}: {sideways} px to scroll sideways"
        if look in READ_BY_AXE:
            found = Axe().run(page, options={"resultTypes": ["violations"]})
            assert not found.response["violations"], found.generate_report()
