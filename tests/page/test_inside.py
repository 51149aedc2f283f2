"""Look inside: the way, attention, lens, pushes and neighbours; by clicks and keys."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from helpers.page_actions import address_of, branch, open_panel, tokens, write

PROMPT = "The old lighthouse keeper climbed the stairs every evening, and when the storm came"
STEP = 3  # the token that is looked at


@pytest.fixture
def inside(page: Page) -> Locator:
    """The panel with a written token selected, all of it unfolded, the first token counted."""
    write(page, PROMPT, max_tokens=8, seed=11)
    tokens(page).nth(STEP).click()
    panel = open_panel(page, "Inside")
    panel.get_by_label("Without the first token").uncheck()
    panel.get_by_role("button", name="Open all").click()
    expect(panel.get_by_role("list", name="Most likely next tokens")).to_be_visible()
    return panel


def look(page: Page, **expected: Any) -> dict[str, Any]:
    """What the server says of the same place."""
    given = {"step": STEP, **expected}
    reply = branch(page)
    answer = page.request.get(
        f"{address_of(page)}/v1/tree/{reply['id']}/look",
        params={name: str(value) for name, value in given.items() if value is not None},
    )
    assert answer.ok, answer.text()
    result: dict[str, Any] = answer.json()
    return result


def strongest(row: list[float]) -> int:
    return max(range(len(row)), key=row.__getitem__)


def targets(panel: Locator) -> Locator:
    return panel.get_by_role("list", name="Largest attention weights").get_by_role("listitem")


def spelled(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "⏎")


def lit_and_masked(page: Page) -> dict[str, list[int]]:
    """The positions that are lit, and those that are masked."""
    script = (
        "(name) => [...document.querySelectorAll('#text .t.' + name)].map((t) => +t.dataset.at)"
    )
    return {name: page.evaluate(script, name) for name in ("lit", "masked")}


def test_the_way_and_the_lens_have_this_tokens_numbers(page: Page, inside: Locator) -> None:
    reply = look(page, include="vectors", top=6)
    expect(inside.locator("[data-fact=id]")).to_have_text(str(reply["token"]["id"]))
    expect(inside).to_contain_text(f"Position {reply['position']}")
    chances = inside.get_by_role("list", name="Most likely next tokens").get_by_role("listitem")
    best = reply["head"]["candidates"][0]
    expect(chances.first).to_have_attribute("data-token", str(best["id"]))
    expect(chances.first).to_contain_text(f"{best['logit']:.1f}")
    picked = inside.locator(".inside-chances .followed")
    expect(picked).to_have_attribute("data-token", str(branch(page)["steps"][STEP]["token"]))
    layers = inside.get_by_role("listbox", name="Layers").get_by_role("option")
    expect(layers).to_have_count(reply["layers"])
    last = layers.last.get_attribute("aria-label") or ""
    assert f"{reply['norms'][-1]:.3g}" in last and f"{reply['part_norms'][-1][1]:.3g}" in last
    # What each layer would have said: the last row is the model's answer.
    lens = look(page, include="lens", top=3)["lens"]["layers"]
    rows = inside.get_by_role("table").get_by_role("row")
    expect(rows).to_have_count(len(lens) + 1)
    best = rows.last.locator(".said").first
    answer = branch(page)["steps"][STEP]["candidates"][0]["token"]
    expect(best).to_have_attribute("data-token", str(answer))
    expect(rows.last.get_by_role("cell").last).to_have_text(f"{lens[-1]['rank'] + 1:,}")
    expect(rows.nth(1).get_by_role("cell").last).to_have_text(f"{lens[0]['rank'] + 1:,}")
    expect(inside.get_by_role("img", name="Rank of the tracked token")).to_be_visible()

    reply = look(page, include="attention")
    mean = reply["attention"]["mean"]
    first = targets(inside).first
    expect(first).to_have_attribute("data-at", str(strongest(mean)))
    strong = page.locator("#text-overlay .inside-arcs path").last
    expect(strong).to_have_attribute("data-at", str(strongest(mean)))
    displayed = lit_and_masked(page)
    total = page.locator("#text .t").count()
    assert max(displayed["lit"]) <= reply["position"] and strongest(mean) in displayed["lit"]
    assert displayed["masked"] == list(range(reply["position"] + 1, total))
    # Another panel: all is put away.
    open_panel(page, "Sampling")
    expect(page.locator("#text-overlay .inside-arcs")).to_have_count(0)
    assert lit_and_masked(page) == {"lit": [], "masked": []}
    # Nothing selected: the same.
    open_panel(page, "Inside")
    expect(page.locator("#text-overlay .inside-arcs")).to_have_count(1)
    page.locator("#text").press("Escape")
    expect(inside).to_contain_text("Select a token")
    expect(page.locator("#text-overlay path")).to_have_count(0)


def test_a_layer_and_a_head_change_the_arcs(page: Page, inside: Locator) -> None:
    reply = look(page, include="attention", heads="true")["attention"]
    by_head = reply["by_head"]
    layer, head = next(
        (a, b)
        for a, rows in enumerate(by_head)
        for b, row in enumerate(rows)
        if strongest(row) != strongest(reply["mean"]) and strongest(row) != strongest(rows[0])
    )
    chosen = inside.get_by_role("combobox", name="Layer")
    expect(inside.get_by_role("combobox", name="Head")).to_be_disabled()
    # In the picture of the way, a click on a layer chooses it for what lies below.
    inside.get_by_role("option", name=f"Layer {layer + 1}:").click()
    expect(chosen).to_have_value(str(layer + 1))
    expect(targets(inside).first).to_have_attribute(
        "data-at", str(strongest(reply["by_layer"][layer]))
    )
    expect(inside.locator(".inside-lens tr.here")).to_have_attribute("data-layer", str(layer + 1))
    inside.get_by_role("combobox", name="Head").select_option(str(head + 1))
    row = by_head[layer][head]
    expect(targets(inside).first).to_have_attribute("data-at", str(strongest(row)))
    arcs = page.locator("#text-overlay .inside-arcs path")
    others = [at for at in range(len(row) - 1) if row[at] >= 0.002]
    expect(arcs).to_have_count(min(25, len(others)))
    # The choice stays when another token is selected.
    tokens(page).nth(STEP + 1).click()
    expect(inside.locator("[data-looked-at]")).to_have_attribute("data-looked-at", str(len(row)))
    again = look(page, step=STEP + 1, include="attention", heads="true", layer=layer + 1)
    expect(targets(inside).first).to_have_attribute(
        "data-at", str(strongest(again["attention"]["by_head"][0][head]))
    )


def test_the_map_of_heads_by_keys_and_without_the_first_token(page: Page, inside: Locator) -> None:
    reply = look(page, include="attention")
    heads = inside.get_by_role("grid")
    expect(heads.get_by_role("gridcell")).to_have_count(reply["layers"] * reply["heads"])
    heads.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        heads.press(key)
    at = reply["attention"]["map"]["place"][2][1]
    says = f"layer 3 head 2 attends most to {spelled(reply['tokens'][at]['text'])}"
    expect(inside.locator(".inside-map [role=status]")).to_contain_text(says)
    heads.press("Enter")
    expect(inside.get_by_role("combobox", name="Layer")).to_have_value("3")
    expect(inside.get_by_role("combobox", name="Head")).to_have_value("2")
    expect(targets(inside).first).to_have_attribute("data-at", str(at))
    heads.press("Enter")  # pressed again, it deselects
    expect(inside.get_by_role("combobox", name="Layer")).to_have_value("")
    # Without the first token, the rest is rescaled.
    mean = reply["attention"]["mean"]
    inside.get_by_label("Without the first token").check()
    rest = [0.0, *mean[1:]]
    first = targets(inside).first
    expect(first).to_have_attribute("data-at", str(strongest(rest)))
    weight = float(first.get_attribute("data-weight") or 0)
    assert weight == pytest.approx(max(rest) / sum(rest), rel=1e-6)
    expect(page.locator('#text .t.lit[data-at="0"]')).to_have_count(0)

    candidates = branch(page)["steps"][STEP]["candidates"]
    picked = branch(page)["steps"][STEP]["token"]
    rival = next(item["token"] for item in candidates if item["token"] != picked)
    reply = look(page, include="attribution", against=rival)["attribution"]
    lead = inside.locator("[data-fact=lead]")
    expect(lead).to_contain_text(f"{abs(reply['logit']):.2f}")
    strong = max(reply["parts"], key=lambda part: part["value"])
    name = f"{strong['name']} {strong['layer'] or ''}".replace("_", "-").strip()
    expect(inside.locator(".inside-list").first.locator("li").first).to_contain_text(name)
    inside.get_by_role("combobox", name="Against").select_option("mean")
    expect(lead).to_contain_text("relative to the mean")
    # Neighbours are of the token that is selected, not of the one before it.
    position = branch(page)["usage"]["prompt_tokens"] + STEP
    near = look(page, step=None, at=position, include="neighbours")["neighbours"]
    chip = inside.locator(".inside-near .chip").first
    expect(chip).to_have_attribute("data-token", str(near[0]["token"]))
    expect(chip).to_contain_text(f"{near[0]['similarity']:.2f}")


def test_prompt_tokens_are_read_and_a_fault_is_said_in_place(
    page: Page, inside: Locator, expected_errors: list[str]
) -> None:
    page.locator("#text .t.prompt").nth(4).click()
    looked_at = inside.locator("[data-looked-at]")
    expect(looked_at).to_have_attribute("data-looked-at", "4")
    expect(inside.get_by_role("button", name="As input")).to_have_attribute("aria-pressed", "true")
    inside.get_by_role("button", name="As prediction").click()
    expect(looked_at).to_have_attribute("data-looked-at", "3")
    page.locator("#text .t.prompt").first.click()
    expect(looked_at).to_have_attribute("data-looked-at", "0")
    expect(inside).to_contain_text("is the first token")
    expect(targets(inside)).to_have_count(1)
    expect(targets(inside)).to_contain_text("100 %")
    page.locator("#text .t.prompt").nth(2).click()  # looked at from the token before it
    expect(inside.locator("[data-sink]")).to_contain_text("attention sink")

    expected_errors.append("Failed to load resource")
    page.route("**/look?*", lambda route: route.abort())
    tokens(page).nth(STEP + 2).click()
    # Each part asks for itself: the one tried again must have failed before the way is free.
    way = inside.locator("[data-part=way]")
    expect(way.get_by_role("alert")).to_contain_text("The server does not answer")
    page.unroute("**/look?*")
    way.get_by_role("button", name="Try again").click()
    expect(way.get_by_role("list", name="Most likely next tokens")).to_be_visible()


@pytest.fixture
def tuned(server: Any) -> Any:
    """A tuned lens of the model that is served."""
    served = server.state.registry.loaded[server.model].lm
    fitted = served.fit_lens([PROMPT, "A cat sat on a mat."], rank=8, progress=False)
    yield served.load_lens(fitted, name="tuned")
    served._shared.lenses = None  # other tests share the server


def test_lenses_are_chosen_and_compared(page: Page, tuned: Any, inside: Locator) -> None:
    part = inside.locator("[data-part=lens]")
    lenses = part.get_by_role("group", name="Lens")
    expect(lenses.get_by_role("button")).to_have_text(["Logit", "Tuned", "Compare"])
    replies = {
        name: look(page, include="lens", lens=name, top=3)["lens"] for name in ("logit", "tuned")
    }
    first = [str(reply["layers"][0]["candidates"][0]["token"]) for reply in replies.values()]
    row = part.locator("tr[data-layer='0'] .said")
    expect(row.first).to_have_attribute("data-token", first[0])
    lenses.get_by_role("button", name="Tuned").click()
    expect(row.first).to_have_attribute("data-token", first[1])
    expect(part).to_contain_text("tuned lens")
    lenses.get_by_role("button", name="Compare").click()
    expect(part.get_by_role("columnheader")).to_have_text(["Layer", "logit", "tuned"])
    expect(row).to_have_count(2)
    assert [cell.get_attribute("data-token") for cell in row.all()] == first
    expect(part.locator(".inside-ranks path")).to_have_count(2)
