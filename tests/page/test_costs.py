"""The costs of a text: time, chance, loops, certainty, guesses; and what the cache is for."""

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
    open_view,
    open_write,
    text,
    tokens,
    write,
)

ORDINARY = "The old sailor looked at the sea and"
ROUND = "The cat sat. The cat sat. The cat sat. The cat sat."  # the model repeats it for ever
PATIENCE = 60_000  # without the cache a text takes long, on a busy machine very long


def figure(panel: Locator, name: str) -> str:
    return panel.locator(f"[data-figure={name}]").inner_text()


def told_seconds(words: str) -> float:
    number, unit = words.split()
    return float(number) / {"ms": 1000, "s": 1}[unit]


def meter(panel: Locator) -> int:
    return int(panel.get_by_role("meter", name="Loop meter").get_attribute("aria-valuenow") or "")


def in_page(page: Page, script: str) -> Any:
    """Run something in the page that has its modules at hand."""
    return page.evaluate(
        f"async () => {{ const part = (name) => import(`/page/code/${{name}}.js`); {script} }}"
    )


@pytest.fixture(scope="module")
def server(real_server: Any) -> Any:
    """The default model: a text goes round only with a model that copies what it read."""
    return real_server


@pytest.fixture
def panel(page: Page) -> Locator:
    """The costs of 24 tokens."""
    write(page, ORDINARY, max_tokens=24, seed=11)
    return open_view(page, "Costs of a text")


def test_the_figures_are_those_of_the_text(page: Page, panel: Locator) -> None:
    reply = branch(page)
    logprob = sum(step["logprob"] for step in reply["steps"])
    assert float(figure(panel, "logprob").replace("−", "-")) == pytest.approx(logprob, abs=0.006)
    perplexity = math.exp(-logprob / len(reply["steps"]))
    assert float(figure(panel, "perplexity")) == pytest.approx(perplexity, abs=0.006)
    tens = round(-logprob / math.log(10))
    expect(panel.get_by_text("This text had a probability of")).to_contain_text(f"1 in 10{tens}")
    expect(panel.locator("[data-figure=chance]")).to_have_text(f"10−{tens}")

    assert float(figure(panel, "rate").replace(",", "")) > 0
    first = reply["last"]["first_token_seconds"]
    assert told_seconds(figure(panel, "first")) == pytest.approx(first, rel=0.1)
    assert figure(panel, "reused") == str(reply["last"]["reused_tokens"])
    drift = sum(-step["logprob"] - step["entropy"] for step in reply["steps"])
    displayed = panel.locator("[data-drift]")
    assert float(displayed.get_attribute("data-drift") or "") == pytest.approx(drift, abs=1e-3)
    expect(displayed).to_contain_text(f"{abs(drift):.2f} nats")

    steps = branch(page)["steps"]
    hand = panel.get_by_role("slider", name="Entropy per token")
    hand.focus()
    hand.press("Home")
    hand.press("ArrowRight")
    spelled = steps[1]["piece"].replace(" ", "␣")
    expect(hand).to_have_attribute(
        "aria-valuetext",
        re.compile(rf"token 2: {re.escape(spelled)}, entropy {steps[1]['entropy']:.2f},"),
    )
    hand.press("Enter")
    expect(tokens(page).nth(1)).to_have_class(re.compile(r"\bselected\b"))

    times = panel.get_by_role("slider", name="Time per token")
    times.scroll_into_view_if_needed()
    box = times.bounding_box()
    assert box
    times.hover(position={"x": box["width"] - 8, "y": box["height"] / 2})
    expect(times).to_have_attribute("aria-valuenow", "24")
    times.click(position={"x": box["width"] - 8, "y": box["height"] / 2})
    expect(tokens(page).last).to_have_class(re.compile(r"\bselected\b"))

    open_write(page)
    expect(page.locator("[data-live=tokens]")).to_have_text("24 tokens")
    assert float(page.locator("[data-live=rate]").inner_text().replace(",", "")) > 0
    page.locator("#text-costs").click()
    expect(panel).to_be_visible()


def test_without_the_cache_the_same_text_takes_ever_longer(page: Page, panel: Locator) -> None:
    before = text(page)
    again = panel.get_by_role("button", name="Measure without the KV cache")
    again.click()
    panel.get_by_role("button", name="Stop measuring").click()
    expect(again).to_be_enabled()
    again.click()
    expect(panel.get_by_text("The temporary branch was deleted.")).to_be_visible(timeout=PATIENCE)
    expect(panel.get_by_text("Both texts are the same: 24 of 24 tokens compared.")).to_be_visible()
    verdict = panel.locator("[data-verdict]")
    expect(verdict).to_contain_text("Without the KV cache, token 24 took")
    expect(panel.get_by_role("img", name="Time per token: token 24 took")).to_be_visible()

    result = in_page(
        page,
        """const { currentBranch } = await part("state");
        const { measurementOf } = await part("costs/panel");
        const late = (steps) => steps.slice(16).reduce((sum, step) => sum + step.seconds, 0);
        const { steps } = measurementOf(currentBranch());
        const same = steps.map((step) => step.piece).join("");
        return { on: late(currentBranch().steps), off: late(steps), same };""",
    )
    assert result["off"] > result["on"]
    assert result["same"] == before
    names = [
        item["name"] for item in page.request.get(f"{address_of(page)}/v1/tree").json()["data"]
    ]
    assert "without cache" not in names
    assert text(page) == before

    panel.get_by_role("switch", name="KV cache").uncheck()
    page.locator("#text").press(".")  # one token
    expect(tokens(page)).to_have_count(25)
    finished(page)
    assert branch(page)["settings"]["cache"] is False
    expect(panel.locator(".chart-key", has_text="without").first).to_be_visible()
    panel.get_by_role("switch", name="KV cache").check()
    page.locator("#text").press(".")
    expect(tokens(page)).to_have_count(26)
    finished(page)
    assert branch(page)["settings"]["cache"] is True


def test_a_text_that_goes_round_drives_the_meter_and_the_guard_repairs_it(
    page: Page, panel: Locator
) -> None:
    assert meter(panel) < 25
    expect(panel.get_by_text("The end of the text does not repeat itself.")).to_be_visible()

    open_write(page)
    write(page, ROUND, max_tokens=40, temperature=0)
    open_view(page, "Costs of a text")
    expect(panel.get_by_text("The text loops")).to_contain_text("␣The␣cat␣sat.")
    expect(panel.locator(".loop-meter.much")).to_be_visible()
    assert meter(panel) > 60

    panel.get_by_role("button", name="Continue with the guard").click()
    expect(panel.get_by_role("switch", name="Guard against loops")).to_be_checked()
    repairs = panel.locator(".repairs button")
    expect(repairs.first).to_contain_text("The cat sat.")
    finished(page)
    expect(panel.locator(".loop-meter.much")).to_have_count(0)
    steps = branch(page)["steps"]
    repaired = [step["index"] for step in steps if step["retracts"]]
    assert repaired
    expect(repairs).to_have_count(len(repaired))
    repairs.first.click()
    place = tokens(page).nth(repaired[0])
    expect(place).to_have_class(re.compile(r"\bselected\b"))
    expect(place).to_have_class(re.compile(r"\brepaired\b"))


def test_guesses_are_counted_and_change_nothing(page: Page) -> None:
    write(page, ROUND, max_tokens=32, temperature=0)
    plain = text(page)
    panel = open_view(page, "Costs of a text")
    expect(panel.get_by_text("The last generation had no draft tokens.")).to_be_visible()
    panel.get_by_role("switch", name="Prompt lookup").check()
    open_write(page)
    write(page, ROUND, max_tokens=32, temperature=0)
    open_view(page, "Costs of a text")
    last = branch(page)["last"]
    assert last["accepted_tokens"] > 0
    assert figure(panel, "accepted") == str(last["accepted_tokens"])
    assert figure(panel, "rejected") == str(last["drafted_tokens"] - last["accepted_tokens"])
    assert text(page) == plain


def test_the_figures_of_made_up_texts(page: Page) -> None:
    result = in_page(
        page,
        """const { LoopMeter, Tally } = await part("costs/tally");
        const { ceiling, fitLine, power, readWithout } = await part("costs/panel");
        const { ticks } = await part("costs/chart");
        const { tokensPerSecond } = await part("write/footer");
        const { sharedSteps } = await part("state");
        const filled = (count, token) => {
          const meter = new LoopMeter();
          for (let i = 0; i < count; i++) meter.push(token(i));
          return meter;
        };
        const round = filled(60, (i) => i % 5);
        const loops = [filled(100, (i) => i).share(), round.share(), round.tail(),
          filled(20, () => 7).tail().times, filled(30, (i) => (i < 24 ? i : i - 20)).tail()];
        round.cut(6);
        round.push(50);
        const step = (token, logprob) => ({ token, logprob, entropy: 0.5, seconds: 0.1,
          chosen: false, draft: "accepted" });
        const steps = Array.from({ length: 40 }, (_, i) => step(i, -1));
        const tally = new Tally().follow(steps);
        const before = [tally.logprob, tally.perplexity, tally.drifts.at(-1), tally.means.at(-1)];
        tally.follow([...steps.slice(0, 10), step(90, -2), step(91, -2)]);
        const { accepted } = tally.drafts.at(-1);
        const texts = (...ids) => ids.map((token) => ({ token }));
        return { loops, cut: [round.share(), round.tokens.length, round.tail().length], before,
          after: [tally.length, tally.logprob, tally.drifts.at(-1), accepted],
          line: fitLine([1, 3, NaN, 7]), none: fitLine([]),
          others: [sharedSteps(texts(1, 2, 3), texts(1, 2, 4)),
            ceiling([...Array(99).fill(1), 50]), readWithout(8, 3), power(-31),
            ticks(-31, 0), ticks(2, 2)],
          rate: [[11, 1, 2], [1, 1, 2], [5, null, 2]].map((given) => tokensPerSecond(...given)) };
        """,
    )
    # The loop meter counts what stood before, and forgets what is cut.
    fresh, *others, quoted = result["loops"]
    assert fresh == 0 and quoted == {"length": 6, "distance": 20, "times": 1}
    assert others == [pytest.approx(52 / 60), {"length": 55, "distance": 5, "times": 12}, 20]
    assert result["cut"] == [0, 7, 0]
    assert result["before"] == pytest.approx([-40, math.e, 20, 0.5])
    assert result["after"] == [12, -14, 8, 12]
    assert result["line"] == pytest.approx({"start": 1, "slope": 2})
    assert result["none"] == {"start": 0, "slope": 0}
    assert result["others"] == [2, 1, 8 + 9 + 10, "10⁻³¹", [-20, 0], [2]]
    assert result["rate"] == [10, None, None]
