"""A step: what was weighed, what the filters left, where the draw fell, and what else might be."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from helpers.page_actions import (
    address_of,
    branch,
    finished,
    next_frames,
    open_panel,
    tokens,
    write,
)

PROMPT = "The old sailor looked at the sea and"


@pytest.fixture
def panel(page: Page) -> Locator:
    """The step panel beside twelve tokens."""
    write(page, PROMPT, max_tokens=12, seed=4)
    return page.locator("#side-panel")


def request_json(page: Page, path: str, body: dict[str, Any] | None = None) -> Any:
    address = f"{address_of(page)}/v1/tree{path}"
    answer = page.request.get(address) if body is None else page.request.post(address, data=body)
    assert answer.ok, answer.text()
    return answer.json()


def percent(text: str) -> float:
    result = re.search(r"([\d.]+) %", text)
    assert result, text
    return float(result[1]) / 100


def move(panel: Locator, name: str, value: float) -> None:
    """A slider, as a drag moves it."""
    what_if(panel)
    panel.get_by_role("slider", name=name, exact=True).fill(str(value))


def what_if(panel: Locator) -> Locator:
    """The part with the sliders, unfolded."""
    if panel.locator(".step-whatif").get_attribute("open") is None:
        panel.get_by_text("Try other settings").click()
    return panel.get_by_role("region", name="Try other settings")


def test_pointing_at_a_token_tells_about_it_and_a_click_keeps_it(
    page: Page, panel: Locator
) -> None:
    expect(panel.get_by_text("Point at a generated token")).to_be_visible()
    step = branch(page)["steps"][3]
    tokens(page).nth(3).hover()
    expect(panel.locator(".step-token")).to_have_text(step["piece"].replace(" ", "␣"))
    facts = panel.locator(".step-facts")
    expect(facts).to_contain_text(f"{-step['logprob']:.2f} nats")
    expect(facts).to_contain_text(f"{-step['logprob'] / math.log(2):.2f} bits")
    expect(facts).to_contain_text(f"{step['entropy']:.2f} nats")
    expect(facts).to_contain_text("of 49,152")
    expect(panel.locator(".step-bytes")).to_contain_text(bytes(step["bytes"]).hex(" "))
    panel.hover()  # the token stays, as long as the pointer is in the panel
    page.wait_for_timeout(600)
    expect(panel.locator(".step-token")).to_be_visible()
    page.locator("#prompt").hover()
    expect(panel.get_by_text("Point at a generated token")).to_be_visible()
    tokens(page).nth(3).click()
    page.locator("#prompt").hover()
    expect(panel.locator(".step-token")).to_be_visible()

    tokens(page).first.click()
    step = branch(page)["steps"][0]
    expect(panel.locator(".step-token")).to_have_text(step["piece"].replace(" ", "␣"))
    rows = panel.locator(".candidate")
    expect(rows).to_have_count(12)
    for row, item in zip(rows.all(), step["candidates"], strict=True):
        mine, after = row.locator(".number").all_text_contents()
        assert percent(mine) == pytest.approx(math.exp(item["logprob"]), abs=0.006)
        if item["probability"] > 0:
            assert percent(after) == pytest.approx(item["probability"], abs=0.006)
        else:
            assert re.fullmatch(r"(top-k|top-p|min-p)", after), after
    expect(panel.locator(".candidate.picked")).to_have_attribute("data-token", str(step["token"]))

    panel.get_by_role("button", name="More").click()
    expect(rows).to_have_count(100)
    extra = request_json(page, f"/{branch(page)['id']}/alternatives?at=0&top=100")["candidates"]
    displayed = [row.get_attribute("data-token") for row in rows.all()]
    assert displayed == [str(item["token"]) for item in extra]
    stages = step["stages"]
    remaining = panel.locator(".candidate:not(.removed)")
    expect(remaining).to_have_count(stages[-1]["kept"])
    panel.get_by_role("button", name="Fewer").click()
    expect(rows).to_have_count(12)

    tokens(page).first.click()
    stages = branch(page)["steps"][0]["stages"]
    names = ["model", "top-k", "top-p", "min-p", "temperature"]
    expect(panel.locator(".chain-name")).to_have_text(names)
    expect(panel.locator(".chain-count")).to_have_text(
        ["49,152", *(f"{stage['kept']:,}" for stage in stages)]
    )
    first = panel.locator(".step-stages li").first
    expect(first).to_contain_text("keeps the 40 most likely")
    expect(first).to_contain_text("−49,112, 40 left")
    assert panel.locator(".chain-ribbon.picked").count() == 4

    tokens(page).first.click()
    draw = branch(page)["steps"][0]["draw"]
    draw_region = panel.get_by_role("region", name="Sampled token")
    expect(draw_region).to_contain_text(f"u = {draw['u']:.4f}")
    expect(draw_region).to_contain_text(f"covers {draw['low']:.4f} to {draw['high']:.4f}")
    line = draw_region.locator("svg").bounding_box()
    ball = draw_region.locator(".line-fall circle")
    expect(ball).to_have_count(1)
    struck = draw_region.locator(".line-struck")
    assert line is not None
    at = float(ball.get_attribute("cx") or 0)
    remaining = float(struck.get_attribute("x") or 0)
    assert remaining <= at <= remaining + float(struck.get_attribute("width") or 0)

    write(page, PROMPT, max_tokens=3, temperature=0)
    tokens(page).first.click()
    expect(draw_region).to_contain_text("Greedy")
    expect(panel.locator(".step-story")).to_contain_text("most likely was taken")


def test_another_candidate_is_written_on_with(page: Page, panel: Locator) -> None:
    before = branch(page)
    tokens(page).nth(4).click()
    picked = panel.locator(".candidate.picked")  # the panel shows this step
    expect(picked).to_have_attribute("data-token", str(before["steps"][4]["token"]))
    other = panel.locator(".candidate:not(.picked)").first
    token = other.get_attribute("data-token")
    other.click()
    expect(tokens(page).nth(4)).to_have_class(re.compile("chosen"))
    finished(page)
    after = branch(page)
    assert after["id"] != before["id"]
    assert str(after["steps"][4]["token"]) == token
    assert after["steps"][:4] == before["steps"][:4]
    expect(panel.get_by_text("chosen by you")).to_be_visible()
    last = after["last"]
    pen = panel.locator(".step-pen")
    expect(pen).to_contain_text(f"{last['reused_tokens']} tokens of {last['tokens_before']}")
    expect(pen).to_contain_text("Time to first token")
    assert last["reused_tokens"] > 0
    # What the model would have weighed there is asked for, as it was not when this was put there.
    expect(panel.locator(".candidate")).to_have_count(12)

    at = next(step["index"] for step in after["steps"][2:] if step["text"].startswith(" "))
    tokens(page).nth(at).click()
    words = panel.get_by_role("textbox", name="Your own text at this position")
    words.fill("Suddenly")
    expect(panel.get_by_text("Enter inserts")).to_contain_text("␣Suddenly")
    words.press("Enter")
    expect(tokens(page).nth(at)).to_have_class(re.compile("chosen"))
    finished(page)
    reply = branch(page)
    start = "".join(step["text"] for step in reply["steps"][:at])
    assert reply["text"].startswith(f"{start} Suddenly")


def test_a_token_of_the_prompt_says_whose_it_is(page: Page) -> None:
    write(page, "Hi", mode="chat", max_tokens=2, seed=1)
    panel = page.locator("#side-panel")
    page.locator("#text .t.added").first.click()
    expect(panel.locator(".step-story")).to_contain_text("chat template")
    page.locator("#text .t.prompt:not(.added)").first.click()
    expect(panel.locator(".step-story")).to_contain_text("Part of your prompt")
    panel.get_by_role("button", name="Inside the model").click()
    expect(panel.locator(".inside")).to_be_visible()


def test_sliders_show_at_once_what_would_have_been(page: Page, panel: Locator) -> None:
    root = branch(page)
    tokens(page).first.click()
    section = what_if(panel)
    section.hover()
    outcome = section.locator(".step-outcome")
    expect(outcome).to_contain_text("again.")
    for value in (0.2, 0.9, 1.5):  # the answer to the last request counts
        move(panel, "Temperature", value)
    move(panel, "Min-p", 0)
    move(panel, "Top-p", 1)
    expect(outcome).to_contain_text("40 left.")
    expect(section.locator("tr.picked, .line-part.hit").first).to_be_attached()
    write_on = section.get_by_role("button", name="Continue with these settings")
    expect(write_on).to_be_enabled()
    words = outcome.locator("p").first.locator(".piece").text_content() or ""

    # The server, asked to write this token with these settings and the same seed, picks the same.
    fork = request_json(page, f"/{root['id']}/fork", {"at": 0})
    settings = {"temperature": 1.5, "min_p": 0, "top_p": 1, "top_k": 40, "max_tokens": 1}
    step = request_json(page, f"/{fork['id']}/resume", settings)["steps"][0]
    assert words == step["piece"].replace(" ", "␣")

    write_on.click()
    expect(tokens(page).first).to_have_class(re.compile("chosen"))
    finished(page)
    after = branch(page)
    assert after["id"] != root["id"]
    assert after["steps"][0]["token"] == step["token"]
    assert after["settings"]["temperature"] == 1.5
    assert after["settings"]["min_p"] == 0
    open_panel(page, "Settings")
    assert float(page.locator("#set-temperature").input_value()) == 1.5


def test_what_if_runs_every_stage(page: Page) -> None:
    write(page, PROMPT, max_tokens=3, seed=11, repetition_penalty=1.3, xtc_probability=0.5)
    root = branch(page)
    tokens(page).nth(1).click()
    panel = page.locator("#side-panel")
    move(panel, "Temperature", 1)
    move(panel, "Typical-p", 0.9)
    settings = {"repetition_penalty": 1.3, "xtc_probability": 0.5, "typical_p": 0.9}
    created = request_json(page, f"/{root['id']}/try", {"at": 1, "temperature": 1, **settings})[
        "step"
    ]
    names = [stage["name"] for stage in created["stages"]]
    assert {"repetition_penalty", "xtc", "typical_p"} <= set(names)
    section = what_if(panel)
    expect(section.get_by_role("button", name="Continue with these settings")).to_be_enabled()
    outcome = section.locator(".step-outcome")
    expect(outcome).to_have_attribute("data-token", str(created["token"]))
    expect(outcome).to_contain_text(f"{created['stages'][-1]['kept']:,} left.")


def test_what_if_that_fails_is_said_in_place_and_tried_again(
    page: Page, panel: Locator, expected_errors: list[str]
) -> None:
    expected_errors.append("503")
    tokens(page).first.click()
    error = {"error": {"message": "the server is full", "type": "overloaded_error"}}
    page.route("**/try", lambda route: route.fulfill(status=503, json=error))
    move(panel, "Temperature", 0)
    section = what_if(panel)
    expect(section.get_by_role("alert")).to_contain_text("The server is full")
    page.unroute("**/try")
    section.get_by_role("button", name="Try again").click()
    expect(section.locator(".step-outcome")).to_contain_text("1 left.")
    expect(section.get_by_role("alert")).to_have_count(0)

    # Everything fits a narrow screen.
    page.set_viewport_size({"width": 360, "height": 740})
    next_frames(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    inside = "(e) => [e.clientWidth, e.scrollWidth]"
    width, wide = panel.locator(".step-panel").evaluate(inside)
    assert wide <= width
    width, wide = panel.locator(".step-chain").evaluate(inside)
    assert wide > width  # the chain scrolls in a separate box

    expect(section).to_contain_text("was 0.80")
    section.get_by_role("button", name="Reset").click()
    expect(panel.get_by_role("slider", name="Temperature", exact=True)).to_have_value("0.8")
    expect(section.get_by_role("button", name="Reset")).to_have_count(0)
