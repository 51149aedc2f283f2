"""What people do on the page."""

from __future__ import annotations

import json
from time import monotonic
from typing import Any

from playwright.sync_api import Locator, Page, ViewportSize, expect

WIDE: ViewportSize = {"width": 1280, "height": 800}


_LEVELS = {"Sampling": "step", "Inside": "inside"}  # of the first tab
# Title of a view: its place, its name in the address, and the name of its region.
_VIEWS = {
    "Compare": ("compare", "settings", "Compare settings"),
    "Samples": ("compare", "samples", "Compare samples"),
    "Models": ("compare", "models", "Compare models"),
    "Search": ("compare", "search", "Search"),
    "Diffusion": ("compare", "diffusion", "Diffusion"),
    "Tokenizer": ("explain", "tokenizer", "Tokenizer"),
    "One token": ("explain", "token", "One token"),
    "Attention": ("explain", "attention", "Attention"),
    "Sudoku": ("explain", "sudoku", "Sudoku"),
    "Training runs": ("lab", "training", "Training runs"),
    "Cost report": ("lab", "measure", "Cost report"),
    "Costs of a text": ("lab", "text", "Costs of a text"),
}


def address_of(page: Page) -> str:
    """The server of the page."""
    return page.url.split("?")[0].rstrip("/")


def open_panel(page: Page, name: str) -> Locator:
    """One of Sampling, Inside, Branches, Settings."""
    tab = "Token" if name in _LEVELS else name
    panel = page.locator("#side-panel")
    button = page.get_by_role("tab", name=tab, exact=True)
    if button.get_attribute("aria-selected") != "true" or not panel.is_visible():
        button.click()
    expect(panel).to_have_attribute("aria-labelledby", f"tab-{tab.lower()}")
    if name in _LEVELS:
        page.locator(f"#level-{_LEVELS[name]}").click()
    return panel


def open_view(page: Page, title: str) -> Locator:
    """A view of Compare, Explain or Lab, by the links at the top."""
    place, name, region = _VIEWS[title]
    page.locator(f"#place-{place}").click()
    page.locator(f"#view-{name}").click()
    view = page.get_by_role("region", name=region, exact=True)
    expect(view).to_be_visible()
    return view


def open_write(page: Page) -> None:
    page.locator("#place-write").click()
    expect(page.locator("#prompt")).to_be_visible()


def open_menu(page: Page, item: str) -> None:
    """Click an item of the menu, by its id."""
    page.locator("#menu-button").click()
    page.locator(f"#{item}").click()


def set_settings(page: Page, **settings: Any) -> None:
    """In the settings panel, as a person types them."""
    panel = open_panel(page, "Settings")
    expect(panel.locator("#preset")).to_be_visible()  # the panel is loaded
    for name, value in settings.items():
        field = page.locator(f"#set-{name}")
        if not field.is_visible():  # in a part that is folded
            field.locator("xpath=ancestor::details").locator("summary").click()
        if isinstance(value, bool):
            field.set_checked(value)
        else:
            field.fill(str(value))
            field.press("Tab")


def use_settings(page: Page, **settings: Any) -> None:
    """Without the panel, in which they take their time."""
    code = "(given) => import('/page/code/actions.js').then((m) => m.updateSettings(given))"
    page.evaluate(code, settings)


def start_writing(page: Page, prompt: str) -> None:
    """Type the prompt of a new text, and Enter."""
    if page.locator("#new").is_visible():
        page.locator("#new").click()
        expect(page.locator("#new")).to_have_count(0)
    page.locator("#prompt").fill(prompt)
    page.locator("#prompt").press("Enter")


def write(
    page: Page, prompt: str, max_tokens: int = 20, mode: str = "plain", **settings: Any
) -> None:
    """Type a prompt, write, and wait until the text is there."""
    use_settings(page, max_tokens=max_tokens, **settings)
    if page.locator("#new").is_visible():
        page.locator("#new").click()
    page.get_by_role("group", name="Mode").get_by_role("button", name=mode.capitalize()).click()
    start_writing(page, prompt)
    expect(page.locator("#text")).not_to_have_attribute("data-branch", "")
    finished(page)
    open_panel(page, "Sampling")


def finished(page: Page) -> None:
    """Wait until nothing is written any more."""
    expect(page.locator("#text .t").first).to_be_visible()
    expect(page.locator("#text")).to_have_attribute("aria-busy", "false")
    expect(page.locator("#pause")).to_have_count(0)


def next_frames(page: Page) -> None:
    """Wait until what was changed is on the screen: two frames."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def until(page: Page, expression: str, seconds: float = 15) -> Any:
    """Wait until this JavaScript gives something true. (`wait_for_function` would need `eval`,
    which the page's policy forbids.)"""
    end = monotonic() + seconds
    while not (result := page.evaluate(expression)):
        assert monotonic() < end, f"never came true: {expression}"
        page.wait_for_timeout(30)
    return result


def tokens(page: Page) -> Locator:
    """The tokens that the model wrote, or a person chose."""
    return page.locator("#text .t:not(.prompt)")


def text(page: Page) -> str:
    """What is written, without the prompt."""
    return "".join(tokens(page).all_text_contents())


def branch(page: Page) -> dict[str, Any]:
    """The branch that is shown, as the server tells it."""
    identity = page.evaluate("import('/page/code/state.js').then((m) => m.state.current)")
    answer = page.request.get(f"{address_of(page)}/v1/tree/{identity}")
    assert answer.ok, answer.text()
    result: dict[str, Any] = answer.json()
    return result


def post(page: Page, path: str, **body: Any) -> dict[str, Any]:
    """What the server answers to a request under `/v1/tree`."""
    headers = {"content-type": "application/json"}
    address = f"{address_of(page)}/v1/tree{path}"
    answer = page.request.post(address, data=json.dumps(body), headers=headers)
    assert answer.ok, answer.text()
    result: dict[str, Any] = answer.json()
    return result


def adopt(page: Page, ids: list[str], current: str) -> None:
    """Show branches that were made elsewhere as this page's own."""
    page.evaluate(
        """async ([ids, current]) => {
            const { adopt } = await import("/page/code/state.js");
            const { api } = await import("/page/code/api.js");
            const { jump } = await import("/page/code/actions.js");
            const { data } = await api.get("/v1/tree");
            data.filter((told) => ids.includes(told.id)).reverse().forEach(adopt);
            await jump(current);
        }""",
        [ids, current],
    )
