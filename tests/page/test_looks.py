"""Every view in light and dark, wide and narrow: accessible by axe's rules, nothing sticks out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from playwright.sync_api import Page, expect

from helpers.page_actions import (
    WIDE,
    adopt,
    open_menu,
    open_panel,
    open_view,
    open_write,
    post,
    tokens,
    write,
)
from helpers.page_colors import check_looks

QUESTION = "Why do leaves change color in fall?"


def written(page: Page) -> None:
    """A text with a token open in the first panel."""
    write(page, QUESTION, mode="chat", max_tokens=30, seed=7)
    tokens(page).nth(8).click()
    open_panel(page, "Sampling")


def branches(page: Page) -> None:
    """Another branch, and the map of both."""
    open_panel(page, "Sampling")
    page.locator("#side-panel .candidate:not(.picked)").first.click()
    expect(page.locator("#pause")).to_have_count(0)
    open_panel(page, "Branches")


def tokens_view(page: Page) -> None:
    open_view(page, "Tokenizer")
    page.locator("textarea").first.fill(f"{QUESTION} 🍁 12345")


def compare_view(page: Page) -> None:
    page.locator("#prompt").fill(QUESTION)
    view = open_view(page, "Compare")
    view.get_by_label("Max tokens", exact=True).fill("30")
    view.locator("#run").click()
    expect(view.get_by_role("button", name="Stop", exact=True)).to_have_count(0, timeout=60_000)


def shared(page: Page) -> None:
    page.get_by_role("button", name="Share").click()
    expect(page.get_by_role("dialog")).to_be_visible()


def models(page: Page) -> None:
    page.locator("#model").click()
    expect(page.get_by_role("dialog", name="Models on this machine")).to_be_visible()


def what_if(page: Page) -> None:
    page.get_by_text("Try other settings").click()
    page.locator("#whatif-temperature").fill("1.5")
    expect(page.locator(".step-compared")).to_be_visible()


def read(page: Page) -> None:
    open_write(page)
    page.locator("#read").click()
    expect(page.locator(".turn .md").first).to_be_visible()
    page.get_by_role("button", name="Edit", exact=True).first.click()
    expect(page.get_by_label("Text of this turn")).to_be_visible()


def editing(page: Page) -> None:
    page.locator("#tokens").click()
    tokens(page).nth(8).click()
    page.locator("#text").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("really ")
    expect(page.get_by_role("group", name="Text after the edit")).to_be_visible()


def unfolded(page: Page) -> None:
    """Everything that folds is open: the controls, the menu, the whole column of Inside."""
    tokens(page).nth(8).click()
    open_panel(page, "Inside")
    page.get_by_role("button", name="Open all").click()
    expect(page.locator(".inside-near .chip").first).to_be_visible()
    page.get_by_role("button", name="More controls", include_hidden=True).evaluate(
        "(b) => b.click()"
    )


def tour(page: Page) -> None:
    open_menu(page, "tour")
    for number in (1, 2):  # each step does something first, and is shown when that is done
        expect(page.locator("#tour-card")).to_contain_text(f"{number} of 7", timeout=60_000)
        page.locator("#tour-next").click()
    expect(page.locator("#tour-card")).to_contain_text("3 of 7", timeout=60_000)
    expect(page.locator("#side-panel .candidate").first).to_be_visible(timeout=30_000)


def samples_view(page: Page) -> None:
    view = open_view(page, "Samples")
    view.get_by_label("Max tokens", exact=True).fill("12")
    view.locator("#run").click()
    expect(view.get_by_role("button", name="Stop", exact=True)).to_have_count(0, timeout=60_000)


def library(page: Page) -> None:
    for words in ("One", "Two"):
        write(page, words, max_tokens=3, seed=1)
    page.locator("#library-button").click()
    expect(page.locator(".library-item")).to_have_count(2)
    page.get_by_role("button", name="Rename or tag").first.click()


def explain(page: Page, title: str) -> None:
    open_view(page, title)
    ready = "#play:enabled" if title == "One token" else ".inside-targets li, .cost-figures"
    expect(page.locator(ready).first).to_be_visible()


VIEWS: dict[str, Callable[[Page], object]] = {
    "first": lambda page: page.locator("#prompt").focus(),
    "keys": partial(open_menu, item="keys"),
    "help": partial(open_menu, item="help"),
    "menu": lambda page: page.locator("#menu-button").click(),
    "models": models,
    "tour": tour,
    "example": partial(open_view, title="Compare"),
    "models-side-by-side": partial(open_view, title="Models"),
    "sudoku": partial(open_view, title="Sudoku"),
    "lab": partial(open_view, title="Training runs"),
    "library": library,
    "samples": samples_view,
    "tokens": tokens_view,
    "compare": compare_view,
}
# What can be seen of one text, one thing after the other.
OF_A_TEXT: dict[str, Callable[[Page], object]] = {
    "step": written,
    "what-if": what_if,
    "inside": partial(open_panel, name="Inside"),
    "settings": partial(open_panel, name="Settings"),
    "map": branches,
    "text": lambda page: page.locator("#text").press("Escape"),  # on a phone the sheet is down
    "unfolded": unfolded,
    "one-token": partial(explain, title="One token"),
    "attention": partial(explain, title="Attention"),
    "costs": partial(explain, title="Costs of a text"),
    "read": read,
    "editing": editing,
    "share": shared,
}
STRANGE = (
    "\n\n   \t\t\u200b\u00a0 \ufeff 你好 👩‍👩‍👧 🏴‍☠️ شجرة خضراء שלום "
    + "Donaudampfschifffahrt" * 9
    + "\n \n"
    "def f(x):\n    return {'<b>': [x, \"&\"]}  # <script>\n"
)
BYTE = 231  # a token of the default model that is one byte, and no character


def strange_branches(page: Page) -> list[str]:
    """A prompt and texts of blanks, invisible and wide characters, and a word that never ends."""
    first = post(page, "", prompt=" \n\u200b", seed=1)["id"]
    post(page, f"/{first}/append", text=STRANGE)
    created = [first, post(page, f"/{first}/choose", at=1, token=BYTE)["id"]]
    for at, words in ((3, "  "), (0, "\n"), (0, "\u200b")):
        created.append(post(page, f"/{first}/choose", at=at, text=words)["id"])
    adopt(page, created, first)
    return created


def strange_panel(name: str, token: int) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        strange_branches(page)
        page.locator("#text .t").nth(token).click(force=True)
        open_panel(page, name)

    return act


def strange_beside(page: Page) -> None:
    created = strange_branches(page)
    open_panel(page, "Branches")
    page.get_by_label("Compare with").select_option(created[1])
    expect(page.get_by_role("region", name="Two branches side by side")).to_be_visible()


def strange_comparison(picture: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        created = strange_branches(page)
        open_view(page, picture)
        page.evaluate(
            """async (ids) => {
                const { setSamples, compare } = await import("/page/code/compare/runs.js");
                const { ensureSteps } = await import("/page/code/actions.js");
                for (const id of ids) await ensureSteps(id);
                compare.columns.forEach((column, at) => Object.assign(column, { id: ids[at] }));
                Object.assign(compare.samples, { root: ids[0], ids });
                setSamples({});
            }""",
            created,
        )
        expect(page.locator(".cmp-text .t").first).to_be_attached()

    return act


LONG = {
    "strange-step": strange_panel("Sampling", 5),
    "strange-inside": strange_panel("Inside", 5),
    "strange-map": strange_panel("Branches", 5),
    "strange-beside": strange_beside,
    "strange-columns": strange_comparison("Compare"),
    "strange-samples": strange_comparison("Samples"),
}


@pytest.mark.parametrize(
    "view", [*VIEWS, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_a_view_is_accessible_and_fits(page: Page, view: str) -> None:
    (VIEWS | LONG)[view](page)
    page.wait_for_load_state("networkidle")
    check_looks(page, view)


def test_all_there_is_to_a_text_is_accessible_and_fits(page: Page) -> None:
    for view, act in OF_A_TEXT.items():
        act(page)
        page.wait_for_load_state("networkidle")
        panels = ("what-if", "inside", "settings", "map")
        check_looks(page, view, "#side-panel" if view in panels else "html")
        page.set_viewport_size(WIDE)
        page.emulate_media(color_scheme="light")
