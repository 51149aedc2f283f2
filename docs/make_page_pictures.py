"""The pictures of the page in README and docs, made from the running page.

    python docs/make_page_pictures.py               # needs Chromium, and the dev extra
    python docs/make_page_pictures.py runs/sotu-d4  # only page-learn.png, of this training run

Starts a server with the default model, does in a browser what the pictures show, and writes
`docs/images/page-*.png` and `page.webp`. The seeds are fixed, so the texts are the same every time.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

IMAGES = Path(__file__).parent / "images"
QUESTION = "Why do leaves change color in fall?"
WIDE = {"width": 1280, "height": 800}
SMALL = {"width": 1000, "height": 640}
NUM_COLORS = 200  # of a picture: text stays sharp, and the file is a third as large
FRAME_SECONDS = 0.1
_SETTINGS = (
    "(some) => import('/page/code/actions.js').then((actions) => actions.updateSettings(some))"
)


@contextmanager
def served_page(*options: str) -> Iterator[str]:
    """Start `unspool page` in a process of its own, with an empty library; yield its address."""
    command = [sys.executable, "-m", "unspool", "page", "--no-open", "--no-state", "--port", "0"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            addresses = (re.search(r"http://\S+", line) for line in process.stderr)
            yield next(match[0] for match in addresses if match)
        finally:
            process.terminate()


def open_page(browser: Browser, address: str, **options: object) -> Page:
    """The page in a new window, without the example of a first visit."""
    page = browser.new_page(**options)  # type: ignore[arg-type]
    page.add_init_script("localStorage.setItem('unspool.visited', 'true')")
    page.goto(address)
    return page


def save(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    colors = picture.quantize(NUM_COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    colors.save(IMAGES / f"{name}.png", optimize=True)


class Film:
    """Frames of the page, each with its duration."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.durations: list[int] = []  # milliseconds

    def take(self, seconds: float) -> None:
        """Record the page for some seconds; equal frames are stored once."""
        end = perf_counter() + seconds
        while perf_counter() < end:
            start = perf_counter()
            frame = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
            self.page.wait_for_timeout(max(0.0, FRAME_SECONDS - (perf_counter() - start)) * 1000)
            duration = round((perf_counter() - start) * 1000)
            if self.frames and frame.tobytes() == self.frames[-1].tobytes():
                self.durations[-1] += duration
            else:
                self.frames.append(frame)
                self.durations.append(duration)

    def save(self, path: Path) -> None:
        first, *rest = self.frames
        first.save(
            path, save_all=True, append_images=rest, duration=self.durations, loop=0, quality=55,
            method=6,
        )  # fmt: skip


def generated_tokens(page: Page) -> Locator:
    return page.locator("#text .t:not(.prompt)")


def ask(page: Page, speed: int = 9) -> None:
    """Ask the question with a fixed seed; `speed` is a position of the speed control."""
    expect(page.locator("#write")).to_be_enabled()
    page.evaluate(_SETTINGS, {"seed": 5, "max_tokens": 120})
    page.locator("#speed").fill(str(speed))
    page.locator("#prompt").press_sequentially(QUESTION, delay=25)
    page.locator("#prompt").press("Enter")


def wait_until_done(page: Page) -> None:
    expect(page.locator("#go-on")).to_be_visible(timeout=60_000)


def open_panel(page: Page, tab: str, level: str | None = None) -> None:
    page.get_by_role("tab", name=tab, exact=True).click()
    if level is not None:
        page.locator(f"#level-{level}").click()


def open_view(page: Page, place: str, view: str) -> None:
    page.locator(f"#place-{place}").click()
    page.locator(f"#view-{view}").click()


def unlikely_token(page: Page) -> Locator:
    """A token with a low probability."""
    return page.locator("#text .t:not(.prompt)[class*=tint-]").nth(3)


def step(page: Page) -> None:
    ask(page)
    wait_until_done(page)
    unlikely_token(page).click()
    page.wait_for_timeout(1200)


def inside(page: Page) -> None:
    step(page)
    open_panel(page, "Token", "inside")
    page.locator(".inside-part[data-part=way] summary").click()
    page.wait_for_timeout(2500)


def branches(page: Page) -> None:
    step(page)
    for number in (4, 9, 15):
        open_panel(page, "Token", "step")
        generated_tokens(page).nth(number).click()
        page.locator("#side-panel .candidate:not(.picked)").first.click()
        page.wait_for_timeout(300)
        wait_until_done(page)
    open_panel(page, "Branches")
    page.wait_for_timeout(800)


def samples(page: Page) -> None:
    expect(page.locator("#write")).to_be_enabled()
    page.evaluate(_SETTINGS, {"seed": 5})
    open_view(page, "compare", "samples")
    page.get_by_label("Max tokens", exact=True).fill("12")
    page.locator("#run").click()
    expect(page.locator("#run")).to_be_visible(timeout=120_000)
    page.wait_for_timeout(800)


def layers(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")  # no stage moves on by itself
    step(page)
    open_view(page, "explain", "token")
    expect(page.locator("#play")).to_be_enabled(timeout=60_000)
    page.get_by_role("button", name="4. Layers").click()
    page.wait_for_timeout(800)


PICTURES: dict[str, tuple[Callable[[Page], None], str]] = {
    "page-step": (step, "light"),
    "page-inside": (inside, "light"),
    "page-map": (branches, "dark"),
    "page-compare": (samples, "light"),
    "page-explain": (layers, "light"),
}


def record_film(page: Page) -> Film:
    """Ask, open a token, click another candidate, and look at the branch."""
    film = Film(page)
    film.take(0.6)
    ask(page, speed=6)  # 30 tokens a second
    film.take(2.4)
    page.locator("#speed").fill("9")
    film.take(0.4)
    wait_until_done(page)
    unlikely_token(page).click()
    film.take(2.2)
    page.locator("#side-panel .candidate:not(.picked)").first.click()
    film.take(2.2)
    wait_until_done(page)
    open_panel(page, "Branches")
    film.take(1.8)
    open_panel(page, "Token", "inside")
    film.take(2.5)
    return film


def training(page: Page) -> None:
    """Move to two checkpoints before the end, and wait for the texts of those around it."""
    expect(page.locator("#lrn-write")).to_be_enabled()
    page.get_by_label("Training step").focus()
    for _ in range(2):
        page.keyboard.press("PageDown")
    expect(page.locator("#lrn-write")).to_be_visible(timeout=60_000)
    page.wait_for_timeout(2000)
    expect(page.locator("#lrn-write")).to_be_visible(timeout=60_000)
    page.locator("h2").first.click()  # the focus goes elsewhere


def main() -> None:
    arguments = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)
        if run := sys.argv[1:]:
            with served_page("--run", *run) as address:
                size = {"width": 1280, "height": 1120}
                page = open_page(browser, address, viewport=size, color_scheme="light")
                training(page)
                save(page, "page-learn")
            return
        for name, (act, theme) in PICTURES.items():
            with served_page() as address:
                page = open_page(browser, address, viewport=WIDE, color_scheme=theme)
                act(page)
                save(page, name)
                page.close()
        with served_page() as address:
            record_film(open_page(browser, address, viewport=SMALL)).save(IMAGES / "page.webp")


if __name__ == "__main__":
    main()
