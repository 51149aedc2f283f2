"""The pictures of the page in README and docs, made from the running page.

    python docs/make_page_pictures.py               # needs Chromium, and the dev extra
    python docs/make_page_pictures.py runs/sotu-d4  # only page-learn.png, of this training run

Starts a server with the default model, does in a browser what the pictures show, and writes
`docs/images/page-*.png` and `page.webp`. The seeds are fixed, so the texts are the same every time.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from PIL import Image
from playwright.sync_api import Locator, Page, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from page import served

IMAGES = Path(__file__).parent / "images"
QUESTION = "Why do leaves change color in fall?"
WIDE = {"width": 1280, "height": 800}
SMALL = {"width": 1000, "height": 640}
FRAME_SECONDS = 0.1
_SETTINGS = "(some) => import('/page/code/actions.js').then((actions) => actions.useSettings(some))"


class Film:
    """Frames of what happens, each as long as it stood."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.stood: list[int] = []  # milliseconds

    def take(self, seconds: float) -> None:
        """What is to be seen for so long; it is looked at again and again meanwhile."""
        end = perf_counter() + seconds
        while perf_counter() < end:
            began = perf_counter()
            frame = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
            self.page.wait_for_timeout(max(0.0, FRAME_SECONDS - (perf_counter() - began)) * 1000)
            stood = round((perf_counter() - began) * 1000)
            if self.frames and frame.tobytes() == self.frames[-1].tobytes():
                self.stood[-1] += stood
            else:
                self.frames.append(frame)
                self.stood.append(stood)

    def save(self, path: Path) -> None:
        first, *rest = self.frames
        told = {
            "append_images": rest,
            "duration": self.stood,
            "loop": 0,
            "quality": 60,
            "method": 4,
        }
        first.save(path, save_all=True, **told)


def written(page: Page) -> Locator:
    return page.locator("#text .t:not(.prompt)")


def ask(page: Page, pace: int = 9) -> None:
    """The question, written with a fixed seed; `pace` is a place of the speed control."""
    page.evaluate(_SETTINGS, {"seed": 5, "max_tokens": 120})
    page.locator("#speed").fill(str(pace))
    page.locator("#prompt").press_sequentially(QUESTION, delay=25)
    page.locator("#prompt").press("Enter")


def done(page: Page) -> None:
    expect(page.locator("#go-on")).to_be_visible(timeout=60_000)


def panel(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def surprising(page: Page) -> Locator:
    """The token that the model saw least coming."""
    return page.locator("#text .t:not(.prompt)[class*=tint-]").nth(3)


def step(page: Page) -> None:
    ask(page)
    done(page)
    surprising(page).click()
    page.wait_for_timeout(1200)


def inside(page: Page) -> None:
    step(page)
    panel(page, "Inside")
    page.get_by_text("The way through the model").click()
    page.wait_for_timeout(2500)


def tree(page: Page) -> None:
    step(page)
    for number in (4, 9, 15):
        panel(page, "Step")
        written(page).nth(number).click()
        page.locator("#side-panel .candidate:not(.picked)").first.click()
        page.wait_for_timeout(300)
        done(page)
    panel(page, "Map")
    page.wait_for_timeout(800)


PICTURES: dict[str, tuple[Callable[[Page], None], str]] = {
    "page-step": (step, "light"),
    "page-inside": (inside, "light"),
    "page-map": (tree, "dark"),
}


def film(page: Page) -> Film:
    """Ask, watch, point at a word, take another, and see the branch."""
    taken = Film(page)
    taken.take(0.6)
    ask(page, pace=6)  # 30 tokens a second
    taken.take(2.4)
    page.locator("#speed").fill("9")
    taken.take(0.4)
    done(page)
    surprising(page).click()
    taken.take(2.2)
    page.locator("#side-panel .candidate:not(.picked)").first.click()
    taken.take(2.2)
    done(page)
    panel(page, "Map")
    taken.take(1.8)
    panel(page, "Inside")
    taken.take(2.5)
    return taken


def learn(page: Page) -> None:
    """The hand two checkpoints before the end, and what those around it write."""
    page.get_by_label("Along the training").focus()
    for _ in range(2):
        page.keyboard.press("PageDown")
    expect(page.locator("#lrn-write")).to_be_visible(timeout=60_000)
    page.wait_for_timeout(2000)
    expect(page.locator("#lrn-write")).to_be_visible(timeout=60_000)
    page.locator("h2").first.click()  # the focus goes elsewhere


def main() -> None:
    arguments = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    run = sys.argv[1:]
    with served(*(["--run", *run] if run else [])) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)

        def fresh(**options: object) -> Page:
            page = browser.new_page(**options)  # type: ignore[arg-type]
            page.add_init_script("localStorage.setItem('unspool.tour', 'true')")
            page.goto(address)
            expect(page.locator("#lrn-write" if run else "#write")).to_be_enabled()
            return page

        if run:
            page = fresh(viewport={"width": 1280, "height": 1120}, color_scheme="light")
            learn(page)
            page.screenshot(path=IMAGES / "page-learn.png")
            return
        for name, (act, theme) in PICTURES.items():
            page = fresh(viewport=WIDE, color_scheme=theme)
            act(page)
            page.screenshot(path=IMAGES / f"{name}.png")
            page.close()
        film(fresh(viewport=SMALL)).save(IMAGES / "page.webp")
        browser.close()


if __name__ == "__main__":
    main()
