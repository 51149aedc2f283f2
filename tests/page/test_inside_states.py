"""Look inside a model whose layers carry states: shown, and who has no attention says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import unspool
from helpers import tiny
from helpers.page_actions import open_panel, tokens, write
from helpers.page_colors import check_looks
from helpers.running_server import Running, running
from helpers.small_model import save_vocabulary
from helpers.tiny_recurrent import nemotron
from unspool.server.runtime.registry import ModelEntry


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny Nemotron: Mamba-2, feed-forwards and attention, each in a separate layer."""
    folder: Path = tmp_path_factory.mktemp("nemotron")
    tiny.filled(nemotron("M-M*-M-", vocab_size=300)()).save_pretrained(folder)
    save_vocabulary(folder)

    def load() -> Any:
        lm = unspool.load(folder, memory=16 << 20)
        lm.end_ids = frozenset()
        return lm

    with running([ModelEntry("nemotron", load, 1 << 20)]) as result:
        yield result


def test_states_are_shown(page: Page) -> None:
    write(page, "The rows of the tree", max_tokens=6, seed=1)
    tokens(page).nth(3).click()
    panel = open_panel(page, "Inside")
    table = panel.get_by_role("region", name="States of recurrent layers")
    expect(table.get_by_role("rowheader")).to_have_text(["1", "3", "6"])  # M-M*-M-
    expect(table.locator("[data-layer='1']")).to_have_attribute("title", "Mamba-2")
    expect(panel.get_by_text("how much it adds to the state")).to_be_visible()
    panel.get_by_role("button", name="Open all").click()
    layers = panel.get_by_role("listbox", name="Layers").get_by_role("option")
    expect(layers.nth(0)).to_have_attribute("aria-label", starting("Layer 1: Mamba-2 added"))
    expect(layers.nth(1)).to_have_attribute("aria-label", starting("Layer 2: feed-forward added"))
    expect(layers.nth(3)).to_have_attribute("aria-label", starting("Layer 4: attention added"))
    layers.nth(2).click()
    expect(panel.get_by_text("Layer 3 has no attention.")).to_be_visible()
    expect(table.locator("tr.here")).to_have_attribute("data-layer", "3")
    panel.get_by_role("button", name="Fold all").click()
    panel.get_by_text("Recurrent states").click()
    expect(table).to_be_visible()
    check_looks(page, "states")


def starting(words: str) -> re.Pattern[str]:
    return re.compile(f"^{words} ")
