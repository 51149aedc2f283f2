"""How quick the page is: frames while a long text streams, and from a click to new words.

    python bench/page.py                    # needs Chromium and the dev extra
    python bench/page.py --tokens 3000 --panel costs

Frames are counted by the browser itself while tokens arrive at full speed. The server runs on the
same machine, so both share its cores. A click on another candidate counts until the first new word
is on the screen (the frame after it is in the document).
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from playwright.sync_api import Page, expect, sync_playwright

# Notes the time of each frame, and how many tokens the text has then.
_WATCH = """() => {
  window.seen = [];
  const note = (time) => {
    window.seen.push([time, document.getElementsByClassName("t").length]);
    requestAnimationFrame(note);
  };
  requestAnimationFrame(note);
}"""
# From a click on a candidate to the frame in which the token behind the chosen one is drawn.
_CLICK = """(at) => new Promise((done) => {
  const before = document.getElementById("text").dataset.branch;
  const began = performance.now();
  document.querySelector("#side-panel .candidate:not(.picked)").click();
  const look = () => {
    const text = document.getElementById("text");
    const isNew = text.dataset.branch !== before && text.querySelector(`[data-at="${at + 1}"]`);
    if (isNew) done(performance.now() - began);
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})"""
_SETTINGS = "(some) => import('/page/code/actions.js').then((actions) => actions.useSettings(some))"


@contextmanager
def served(*options: str) -> Iterator[str]:
    """A server of its own, in a process of its own; gives its address."""
    command = [sys.executable, "-m", "unspool", "page", "--no-open", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            told = next(line for line in process.stderr if "http://" in line)
            found = re.search(r"http://\S+", told)
            assert found
            yield found[0]
        finally:
            process.terminate()


def ask(page: Page, prompt: str, **settings: object) -> None:
    page.evaluate(_SETTINGS, settings)
    page.locator("#prompt").fill(prompt)
    page.locator("#prompt").press("Enter")
    page.locator("#pause").wait_for()


def finished(page: Page) -> None:
    # Not `expect`: it reads the whole page again and again while it waits, and stops its frames.
    page.locator("#go-on").wait_for(timeout=300_000)


def frames(page: Page, tokens: int, panel: str) -> None:
    """Frame rates while the text grows, by its length."""
    page.locator(f"#tab-{panel}").click()
    page.evaluate(_WATCH)
    ask(page, "Tell me a long story.", seed=3, max_tokens=tokens, end=False)
    finished(page)
    seen = page.evaluate("window.seen")
    first = next(number for number, (_, count) in enumerate(seen) if count > 60)
    last = next(number for number, (_, count) in enumerate(seen) if count == seen[-1][1])
    seen = seen[first:last]
    edges = [0, tokens // 4, tokens // 2, tokens * 3 // 4, 1 << 30]
    print(f"panel {panel}: tokens on the page, frames/s, slowest 5 % of frames, tokens/s")
    for low, high in pairwise(edges):
        part = [each for each in seen if low <= each[1] < high]
        if len(part) < 20:
            continue
        gaps = sorted(b[0] - a[0] for a, b in pairwise(part))
        seconds = (part[-1][0] - part[0][0]) / 1000
        rate, slow = len(gaps) / seconds, gaps[int(len(gaps) * 0.95)]
        speed = (part[-1][1] - part[0][1]) / seconds
        print(f"  {part[0][1]:5} - {part[-1][1]:5}   {rate:5.1f}   {slow:5.1f} ms   {speed:4.0f}")


def clicks(page: Page, rounds: int) -> None:
    """From a click on a candidate to its first new word on the screen."""
    page.locator("#tab-step").click()
    ask(page, "Why do leaves change color in fall?", seed=7, max_tokens=100)
    finished(page)
    times = []
    for number in range(rounds):
        token = page.locator("#text .t:not(.prompt)").nth(5 + 3 * number)
        at = int(token.get_attribute("data-at") or 0)
        token.click()
        expect(page.locator("#side-panel .candidate:not(.picked)").first).to_be_visible()
        times.append(page.evaluate(_CLICK, at))
        finished(page)
    times.sort()
    print(
        f"click to new words, {rounds} times: median {statistics.median(times):.0f} ms, "
        f"slowest {times[-1]:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2400)
    parser.add_argument("--panel", default="step,costs")
    parser.add_argument("--clicks", type=int, default=12)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    given = parser.parse_args()
    arguments = ["--no-sandbox", "--disable-gpu"]
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.browser, args=arguments)

        def fresh() -> Page:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.add_init_script("localStorage.setItem('unspool.tour', 'true')")
            page.goto(address)
            expect(page.locator("#write")).to_be_enabled()
            return page

        clicks(fresh(), given.clicks)
        for panel in given.panel.split(","):
            frames(fresh(), given.tokens, panel)
        browser.close()


if __name__ == "__main__":
    main()
