"""Features of a token in the Steer section: bars, examples, and a clamped one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from helpers.page_actions import branch, open_panel, post, tokens, write
from helpers.page_colors import check_looks
from helpers.sae_folder import write_saelens
from unspool.lens.sae import load_sae, save_examples, strongest_examples

PROMPT = "The old lighthouse keeper climbed the stairs every evening, and when the storm came"
AT = 3


@pytest.fixture(scope="module")
def sae(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The model of the server has one while these tests run."""
    lm = server.state.registry.loaded[server.model].lm
    folder = tmp_path_factory.mktemp("saes") / "tiny-sae"
    write_saelens(folder, "standard", width=lm.config.width)
    texts = ["The storm came in the evening", "We climbed the old stairs"]
    save_examples(folder, strongest_examples(lm, texts, load_sae(folder), 2))
    yield lm.add_autoencoder(folder)
    lm._shared.autoencoders = {}


@pytest.fixture
def steer(page: Page, sae: Any) -> Locator:
    write(page, PROMPT, max_tokens=8, seed=11, end=False)
    tokens(page).nth(AT).click()
    open_panel(page, "Inside")
    section = page.locator('[data-part="steer"]')
    section.locator("summary").click()
    section.locator("#steer-length").select_option("20")
    expect(section.locator(".feature-row").first).to_be_visible()
    return section


def test_features_are_clamped_with_a_click(page: Page, steer: Locator, sae: Any) -> None:
    before = branch(page)
    rows = steer.locator(".feature-row")
    first = rows.first
    number = int(first.locator(".mono").first.inner_text())
    strengths = [
        float(text) for text in steer.locator(".feature-row .mono:nth-child(3)").all_inner_texts()
    ]
    assert strengths == sorted(strengths, reverse=True) and strengths[0] > 0
    first.click()
    expect(first).to_have_attribute("aria-pressed", "true")
    expect(steer.get_by_label(f"Where feature {number} is strongest")).to_be_visible()
    slider = steer.get_by_label("Value")
    slider.fill(slider.get_attribute("max") or "")
    value = float(slider.input_value())
    assert value > strengths[0]
    expect(steer.get_by_role("button", name="Keep as branch")).to_be_enabled()
    change = {"feature": number, "strength": value}
    reply = post(page, f"/{before['id']}/steer", at=AT, max_tokens=20, changes=[change])
    spelled = "".join(step["piece"] for step in reply["steps"]).replace("\n", "⏎")
    expect(steer.locator(".steer-text p").nth(1)).to_contain_text(spelled)
    steer.get_by_role("button", name="Keep as branch").click()
    note = page.get_by_role("group", name="Changes inside the model")
    expect(note).to_contain_text(f"feature {number} = ")
    assert branch(page)["parent"] == before["id"]


def test_a_second_click_releases_it(page: Page, steer: Locator) -> None:
    row = steer.locator(".feature-row").nth(1)
    row.click()
    expect(steer.locator(".steer-change")).to_have_count(1)
    row.click()
    expect(steer.locator(".steer-change")).to_have_count(0)
    expect(row).to_have_attribute("aria-pressed", "false")
    # Another token has other features.
    text = steer.locator("#features h4").inner_text()
    tokens(page).nth(AT + 1).click()
    expect(steer.locator("#features h4")).not_to_have_text(text)


def test_the_looks_of_features(page: Page, steer: Locator) -> None:
    steer.locator(".feature-row").first.click()
    expect(steer.get_by_role("button", name="Keep as branch")).to_be_enabled()
    check_looks(page, "features", '[data-part="steer"]')
