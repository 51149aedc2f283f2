"""Learn, a training as a film: the curve, dragging along it, what checkpoints write, control."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

import unspool
from helpers import training_run
from helpers.page_actions import WIDE, open_panel, open_view, until
from helpers.page_colors import check_looks
from helpers.running_server import Running, running
from unspool.server.runtime.registry import ModelEntry
from unspool.train.routes import ServerTrainer
from unspool.train.running.runs import Run

STAND_IN = [sys.executable, str(Path(__file__).parent.parent / "helpers" / "stand_in_trainer.py")]
REFUSED = "Failed to load resource"  # what the browser says when a server says no
FILM = [0, 2, 6, 20, 60, 200]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("runs")
    training_run.make_run(result)
    return result


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Running]:
    folder = root / "speeches" / "checkpoints" / "000200"
    entry = ModelEntry("first", lambda: unspool.load(folder, memory=8 << 20), 1000)
    with running([entry], runs=root, drain=0.1) as result:
        yield result


def learn(page: Page, served: Running, run: str) -> Locator:
    """The view, with this run in it."""
    page.goto(f"{served.url}/?run={run}")
    view = page.get_by_role("region", name="Training runs")
    expect(view.locator("#lrn-run")).to_have_value(run)
    return view


@pytest.fixture
def page(window: Any) -> Iterator[Page]:
    """A window; what is shown in it is said by `learn`."""
    window.forget()
    yield window.page
    assert not [fault for fault in window.faults if REFUSED not in fault]


def columns(view: Locator) -> list[int]:
    return [
        int(item.get_attribute("data-step") or "") for item in view.locator("[data-step]").all()
    ]


def column(view: Locator, step: int) -> Locator:
    return view.locator(f'[data-step="{step}"]')


def hand(view: Locator) -> Locator:
    return view.get_by_role("slider", name="Training step")


def written(view: Locator, tokens: int = 12) -> None:
    """Have every visible checkpoint write this many tokens."""
    view.get_by_label("Max tokens", exact=True).fill(str(tokens))
    view.get_by_label("Max tokens", exact=True).press("Enter")
    settled(view)


def settled(view: Locator) -> None:
    expect(view.locator("#lrn-write")).to_be_visible(timeout=60_000)
    expect(view.locator(".lrn-text .t").first).to_be_visible()


def words(part: Locator) -> str:
    return "".join(part.locator(".cmp-text .t").all_text_contents())


def api_text(served: Running, model: str, tokens: int = 12) -> dict[str, Any]:
    """The same, asked without the page."""
    request = {"model": model, "prompt": "The", "seed": 7, "temperature": 0.8, "max_tokens": tokens}
    started = httpx.post(f"{served.url}/v1/tree", json=request, timeout=60).json()
    address = f"{served.url}/v1/tree/{started['id']}/resume"
    result: dict[str, Any] = httpx.post(address, json={}, timeout=60).json()
    return result


# -- the curve ---------------------------------------------------------------------------------


def test_the_curve_shows_every_step_and_is_read_by_keys(page: Page, served: Running) -> None:
    view = learn(page, served, "speeches")
    slider = hand(view)
    expect(slider).to_have_attribute("aria-valuenow", "200")
    expect(view.locator("[data-figure=step]")).to_have_text("200")
    expect(view.locator("#lrn-state")).to_have_text("done")
    box = slider.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 10, box["y"] + 60)
    expect(view.locator("[data-figure=step]")).to_have_text("0")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    expect(view.locator("[data-figure=step]")).not_to_have_text(re.compile("^(0|200)$"))
    expect(slider).to_have_attribute("aria-valuenow", "200")  # to point is not yet to drag
    page.mouse.move(5, 5)
    expect(view.locator("[data-figure=step]")).to_have_text("200")
    expect(view.locator("[data-figure=bits]")).to_have_text(
        f"{training_run.bits_per_byte(200):.3f}"
    )

    slider.focus()
    for key, step in (("Home", 0), ("PageUp", 2), ("PageUp", 6), ("PageDown", 2), ("End", 200)):
        page.keyboard.press(key)
        expect(slider).to_have_attribute("aria-valuenow", str(step))
    page.keyboard.press("ArrowLeft")
    now = until(page, "Number(document.querySelector('.lrn-hand').ariaValueNow) % 200")
    assert 180 < now < 200
    page.keyboard.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuenow", "200")
    loss = training_run.loss(200) + 0.1
    expect(slider).to_have_attribute(
        "aria-valuetext",
        re.compile(rf"step 200, 102,400 tokens, loss 2\.\d\d, held out {loss:.2f}"),
    )

    line = view.locator("path.lrn-train")
    observed = {line.get_attribute("d") or ""}

    def another() -> None:
        new = "seen => !seen.includes(document.querySelector('path.lrn-train').getAttribute('d'))"
        page.wait_for_function(new, arg=sorted(observed))
        observed.add(line.get_attribute("d") or "")

    view.locator("#lrn-smooth").select_option("0")
    expect(line).to_have_attribute("d", view.locator("path.lrn-raw").get_attribute("d") or "")
    another()
    view.get_by_label("steps", exact=True).uncheck()
    another()
    view.get_by_label("loss", exact=True).check()
    another()
    view.get_by_role("button", name="Time").click()
    expect(view.get_by_label("time", exact=True)).not_to_be_checked()
    expect(view.locator(".lrn-tick").filter(has_text=re.compile(r"^10 s$"))).to_have_count(1)
    page.reload()  # kept for the next visit
    expect(view.get_by_role("button", name="Time")).to_have_attribute("aria-pressed", "true")
    expect(view.locator("#lrn-smooth")).to_have_value("0")


# -- what checkpoints write --------------------------------------------------------------------


def test_dragging_along_the_curve_writes_with_the_nearest_checkpoints(
    page: Page, served: Running
) -> None:
    view = learn(page, served, "speeches")
    expect(column(view, 200)).to_have_attribute("aria-current", "true")
    before = columns(view)
    assert before == FILM[-len(before) :] and len(before) >= 3
    expect(column(view, 200)).to_contain_text("people at step 200")  # as the run itself wrote
    view.get_by_label("Max tokens", exact=True).fill("12")
    box = hand(view).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 25, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 48, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(column(view, 0)).to_have_attribute("aria-current", "true")
    expect(column(view, 0).locator(".t").first).to_be_visible(timeout=60_000)
    settled(view)
    now = columns(view)
    assert now == FILM[: len(before)]
    for step in now:
        reply = api_text(served, f"speeches@{step}")
        pieces = [item["text"] for item in reply["steps"] if "\ufffd" not in item["text"]]
        displayed = words(column(view, step))
        assert all(piece in displayed for piece in pieces)
        expect(column(view, step).locator(".t")).to_have_count(len(reply["steps"]))
        entropy = sum(item["entropy"] for item in reply["steps"]) / len(reply["steps"])
        expect(column(view, step).locator("[data-number=entropy]")).to_have_text(
            f"{entropy:.2f} nats"
        )
        bits = training_run.bits_per_byte(step)
        expect(column(view, step).locator("[data-number=bits]")).to_have_text(f"{bits:.3f}")

    measured = page.evaluate(
        """import("/page/code/token_text.js").then(({ repeatedWords }) => [
            repeatedWords("The people, the people and THE people"), repeatedWords("one two three"),
            repeatedWords("word"), repeatedWords("…"),
            repeatedWords(`again ${"abcdefghijklmnopqrstuvwxyz".split("").join(" ")} again`)])"""
    )
    assert measured == [4 / 7, 0, None, None, 0]
    # What cannot be written is said.
    view.get_by_label("Temperature").fill("hot")
    view.locator("#lrn-write").click()
    expect(view.get_by_role("alert")).to_contain_text("Temperature must be >= 0, got “hot”")
    expect(view.get_by_label("Temperature")).to_have_attribute("aria-invalid", "true")
    view.get_by_label("Temperature").fill("0.8")
    view.get_by_label("Max tokens", exact=True).fill("100000000000")
    view.locator("#lrn-write").click()
    expect(column(view, 0).get_by_role("alert")).to_contain_text(
        "max_tokens must be < 2147483648, got 100000000000"
    )


def test_a_token_is_open_as_everywhere(page: Page, served: Running) -> None:
    view = learn(page, served, "speeches")
    written(view)
    token = column(view, 60).locator(".t").nth(3)
    token.click()
    panel = page.locator("#side-panel")
    expect(panel.locator(".candidate").first).to_be_visible()
    expect(panel).to_contain_text("259")  # tokens that this model knows, not the page's own
    expect(column(view, 60).locator("#text .t.selected")).to_have_count(1)
    open_panel(page, "Inside")
    expect(panel.locator(".inside-targets li").first).to_be_visible()
    expect(column(view, 60).locator("#text-overlay .inside-arcs path").first).to_be_attached()
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)
    # Another candidate is taken, and the checkpoint continues from there.
    column(view, 20).locator(".t").nth(2).click()
    open_panel(page, "Sampling")
    before = column(view, 20).locator("#text").get_attribute("data-branch") or ""
    panel.locator(".candidate:not(.picked)").first.click()
    expect(column(view, 20).locator("#text")).not_to_have_attribute("data-branch", before)
    expect(column(view, 20).locator(".t.chosen")).to_have_count(1)
    page.keyboard.press("Escape")
    column(view, 60).get_by_role("button", name="Open step 60 in Write").click()
    expect(page.locator("#text .t")).to_have_count(12 + 3)
    expect(page.locator(".other-model")).to_contain_text("speeches@60 wrote this text")


# -- a run that goes ---------------------------------------------------------------------------


def test_a_run_is_shown_as_it_goes(page: Page, served: Running, root: Path) -> None:
    run = training_run.make_run(root, "live", until=20)
    training_run.going(run)
    view = learn(page, served, "live")
    expect(view.locator("#lrn-state")).to_have_text("running")
    expect(hand(view)).to_have_attribute("aria-valuemax", "20")
    assert 60 not in columns(view)
    training_run.log_steps(run, 21, 70)
    training_run.add_checkpoint(run, 60)
    expect(hand(view)).to_have_attribute("aria-valuenow", "70")  # it follows the end
    expect(column(view, 60)).to_be_visible()
    expect(view.locator(".lrn-progress")).to_contain_text("70 of 200")
    run.update(state="failed", error="the loss became NaN at step 71; try a smaller rate")
    expect(view.locator("#lrn-state")).to_have_text("failed")
    expect(view.get_by_role("alert")).to_contain_text("the loss became NaN at step 71")
    run.update(state="running", pid=1 << 22, pid_started=1, error=None)
    page.reload()
    expect(view.locator("#lrn-state")).to_have_text("broken off")
    expect(view.get_by_role("alert")).to_contain_text("The training process is gone")


def test_a_small_run_is_started_paused_and_stopped_from_the_page(
    page: Page, served: Running, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerTrainer, "command", STAND_IN)
    monkeypatch.setattr(ServerTrainer, "check_source", lambda *_: None)
    view = learn(page, served, "speeches")
    view.get_by_text("Train a small model").click()
    view.get_by_label("Data: a data set").fill("missing.txt")
    start = view.get_by_role("button", name="Start")
    start.click()
    expect(view.get_by_role("alert")).to_contain_text("missing.txt: there is no such file")
    view.get_by_text("Train a small model").click()
    view.get_by_label("Data: a data set").fill("letters.txt")
    view.get_by_label("Layers").fill("2")
    start.click()
    expect(view.locator("#lrn-run")).to_have_value("letters-d2", timeout=30_000)
    expect(view.locator("#lrn-state")).to_have_text("running", timeout=30_000)
    expect(view.locator("path.lrn-train")).to_be_attached()
    run = Run(root / "letters-d2")
    view.locator("#lrn-pause").click()
    expect(view.locator("#lrn-state")).to_have_text("paused")
    assert run.state == "paused"
    view.locator("#lrn-go").click()
    expect(view.locator("#lrn-state")).to_have_text("running")
    view.locator("#lrn-stop").click()
    expect(view.locator("#lrn-state")).to_have_text("stopped")
    assert run.state == "stopped"
    query = parse_qs(urlsplit(page.url).query)  # the latest text of the server may be in it too
    assert query["run"] == ["letters-d2"] and query["view"] == ["training"]


# -- looks -------------------------------------------------------------------------------------


def test_it_is_accessible_and_fits(page: Page, served: Running) -> None:
    view = learn(page, served, "speeches")
    written(view)
    page.wait_for_load_state("networkidle")
    check_looks(page, "learn")
    page.set_viewport_size(WIDE)
    column(view, 200).locator(".t").nth(2).click()
    expect(page.locator("#side-panel .candidate").first).to_be_visible()
    check_looks(page, "learn-token", "#side-panel")
    # On a phone, which has room for one column, the token stands above its sheet.
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 390, "height": 844})
    expect(view.locator("[data-step]")).to_have_count(1)
    column(view, 200).locator(".t").nth(2).click()
    expect(page.locator("#side-panel")).to_be_visible()
    free = """(() => {
        const token = document.querySelector("#text .t.selected")?.getBoundingClientRect();
        const sheet = document.querySelector(".side").getBoundingClientRect();
        return token && token.top >= 0 && token.bottom < sheet.top;
    })()"""
    until(page, free)
    page.get_by_role("button", name="Close the panel").click()
    expect(page.locator("#side-panel")).not_to_be_visible()


def test_without_any_run_it_says_how_to_begin(window: Any, tmp_path: Path, root: Path) -> None:
    folder = root / "speeches" / "checkpoints" / "000200"
    entry = ModelEntry("first", lambda: unspool.load(folder, memory=8 << 20), 1000)
    with running([entry], runs=tmp_path / "none", drain=0.1) as empty:
        page = window.visit(f"{empty.url}/")
        open_view(page, "Training runs")
        expect(page.get_by_text("There is no training run in")).to_be_visible()
        expect(page.get_by_role("button", name="Start")).to_be_visible()
        check_looks(page, "learn-empty")


# -- the real thing ----------------------------------------------------------------------------

TEXT = "\n\n".join(
    f"In the year {year} the people of the Union {verb} the laws of the land."
    for year in range(1790, 1990)
    for verb in ("kept", "made", "honored")
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_is_trained_from_the_page_and_each_of_its_checkpoints_writes(
    page: Page, served: Running, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "laws.txt").write_text(TEXT)
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    view = learn(page, served, "speeches")
    view.get_by_text("Train a small model").click()
    view.get_by_label("Data: a data set").fill(str(tmp_path / "laws.txt"))
    view.get_by_label("Layers").fill("1")
    view.get_by_label("Minutes").fill("0.1")
    view.get_by_role("button", name="Start").click()
    expect(view.locator("#lrn-run")).to_have_value("laws-d1", timeout=30_000)
    expect(view.locator("#lrn-state")).to_have_text("done", timeout=400_000)
    run = Run(root / "laws-d1")
    assert run.final is not None
    written(view)
    displayed = columns(view)
    assert displayed[-1] == run.steps
    for step in displayed:
        expect(column(view, step).locator(".t")).to_have_count(12)
        expect(column(view, step).locator("[data-number=entropy]")).to_contain_text("nats")
    expect(column(view, displayed[-1]).locator("[data-number=bits]")).to_contain_text(".")
    hand(view).focus()
    page.keyboard.press("Home")
    expect(column(view, 0).locator(".t").first).to_be_visible(timeout=60_000)
