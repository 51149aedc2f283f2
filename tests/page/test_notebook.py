"""Results as a notebook shows them, in a real browser: readable, harmless, and with their facts."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from helpers.page_colors import axe_violations
from unspool.engine.results import Candidate, Score, Step, TokenScore

EVIL = '<script>window.hurt=1</script><img src=x onerror="window.hurt=1">"\' onmouseover="hurt=1'
# A light page, a dark one, and JupyterLab's two themes by the names that it gives their colours.
THEMES = {
    "light": "background:#fff;color:#111",
    "dark": "background:#111;color:#eee",
    "lab light": "background:#fff;color:#222;--jp-content-font-color1:rgba(0,0,0,.87)",
    "lab dark": "background:#111;color:#ddd;--jp-content-font-color1:rgba(255,255,255,1)",
}


def a_score() -> Score:
    """Tokens of every probability, one of them evil."""
    places = [TokenScore(1, "The", None, None, None)]
    for number, logprob in enumerate((-0.01, -0.3, -0.9, -1.8, -4.0, -20.0)):
        weighed = (Candidate(7, EVIL, logprob, 0.5),)
        places.append(TokenScore(number, f" word{number}", logprob, number, 1.5, weighed))
    return Score([*places, TokenScore(9, EVIL, -1.0, 3, 2.0)])


@pytest.fixture(scope="module")
def pictures(tiny_lm: Any) -> list[str]:
    """Everything that has a picture, from a model without words, and an evil text."""
    prompt = [5, 6, 7, 8]
    text = tiny_lm.generate(prompt, max_tokens=6, seed=1, top=3, explain=True, end=False)
    said = tiny_lm.samples(prompt, 2, max_tokens=4, seed=1)
    observed = tiny_lm.look(prompt)
    evil = Step(1, EVIL.encode(), EVIL, -0.5, 4, chosen=True)
    result = [
        a_score(), evil, text, said, observed, tiny_lm.logit_lens(observed),
        tiny_lm.attribution(observed),
        tiny_lm.beam(prompt, beams=2, results=2, max_tokens=3),
        tiny_lm.vote(prompt, 3, extract=lambda g: EVIL, max_tokens=2),
        tiny_lm.search(prompt, width=2, tokens=2, keep=1, depth=2, seed=1),
    ]  # fmt: skip
    text.steps[2:3] = [evil]
    return [item._repr_html_() for item in [*result, text]]


@pytest.fixture
def sheet(browser: Browser) -> Any:
    page = browser.new_page()
    yield page
    page.close()


def show_pictures(page: Page, pictures: list[str], theme: str) -> None:
    page.set_content(
        f"<!doctype html><html lang=en><title>Notebook</title><body style='{THEMES[theme]}'>"
        f"<main><h1>Results</h1>{''.join(pictures)}</main>"
    )


def test_it_can_be_read_by_everybody(sheet: Page, pictures: list[str]):
    for theme in THEMES:
        show_pictures(sheet, pictures, theme)
        for fold in sheet.locator("details").all():
            fold.locator("summary").click()
        options = {} if theme == "light" else {"runOnly": ["color-contrast"]}
        assert not axe_violations(sheet, {"resultTypes": ["violations"], **options}), theme


def test_nothing_that_a_model_writes_runs(sheet: Page, pictures: list[str]):
    requests: list[str] = []
    sheet.on("request", lambda request: requests.append(request.url))
    show_pictures(sheet, pictures, "light")
    for token in sheet.locator(".text span").all():
        token.hover()
    assert sheet.evaluate("window.hurt") is None
    assert sheet.locator(".unspool script, .unspool img").count() == 0
    assert not requests  # nothing comes from elsewhere


def test_hovering_tells_the_step(sheet: Page, pictures: list[str]):
    show_pictures(sheet, pictures, "light")
    tokens = sheet.locator(".unspool").first.locator(".text span")
    assert tokens.count() == 8
    assert tokens.nth(0).get_attribute("title") == "'The'\ntoken 1\nnothing before it"
    title = tokens.nth(2).get_attribute("title") or ""
    assert title.startswith("' word1'\ntoken 1\nprobability 74.1%, rank 2\nentropy 1.50 nats\n")
    assert "<script>window.hurt=1</script>" in title  # as words
    assert tokens.last.inner_text() == EVIL
    colours = [token.evaluate("e => getComputedStyle(e).backgroundColor") for token in tokens.all()]
    assert len(set(colours[1:7])) == 5  # one for each step of the scale
    sheet.locator("summary").first.click()
    assert "' word1'" in sheet.locator("details table").first.inner_text()
