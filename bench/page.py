"""Speed of the web UI in Chromium: cold start, and frames while a text streams.

    python bench/page.py                        # the default model
    python bench/page.py --model qwen3-0.6b --tokens 2000
    python bench/page.py --tab                  # without a server, the model in the browser tab

Prints: seconds and kilobytes until Write is enabled in a new window with an empty cache (the first
visit is also the first request to the server), with the parts of that time. And while `--tokens`
tokens are written at full speed: the 95th percentile of the time between frames, and long tasks.
Then a letter is typed in the middle: until it is shown, until the tokens after it are scored, and
until all are.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

_OBSERVE = """() => {
    window.frames_ms = []; window.tasks_ms = [];
    let last = performance.now();
    const frame = (now) => {
        frames_ms.push(now - last);
        last = now;
        requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
    new PerformanceObserver((list) => tasks_ms.push(...list.getEntries().map((e) => e.duration)))
        .observe({ type: "longtask" });
}"""
# Milliseconds since the navigation started: when each part had arrived.
_PARTS = """() => {
    const files = performance.getEntriesByType("resource");
    const last = (word) => Math.round(Math.max(0, ...files
        .filter(({ name }) => name.includes(word)).map((e) => e.responseEnd)));
    const [page] = performance.getEntriesByType("navigation");
    const paint = performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0;
    return { page: Math.round(page.responseEnd), styles: last(".css"), code: last("/page/code/"),
        models: last("/v1/models"), "first paint": Math.round(paint) };
}"""
# Milliseconds after a letter is typed in the middle of the text.
_OBSERVE_EDIT = """() => {
    const body = document.querySelector("#text .tokens");
    const all = [...body.querySelectorAll(".t")];
    const token = all[Math.floor(all.length / 2)];
    body.focus();
    document.getSelection().collapse(token.firstChild, token.textContent.length);
    window.edit_ms = {};
    body.addEventListener("beforeinput", () => {
        const began = performance.now();
        const passed = () => Math.round(performance.now() - began);
        requestAnimationFrame(() => requestAnimationFrame(() => { edit_ms.shown = passed(); }));
        let most = 0;
        const look = () => {
            const left = body.querySelectorAll(".unscored").length;
            if (edit_ms.shown && !body.querySelector(".draft")) {
                most = Math.max(most, left);
                if (left < most || left === 0) edit_ms.next ??= passed();
                if (left === 0) edit_ms.all = passed();
            }
            if (!edit_ms.all) requestAnimationFrame(look);
        };
        look();
    }, { once: true, capture: true });
}"""
_NO_EXAMPLE = "localStorage.setItem('unspool.visited', 'true')"


def measure_cold(browser: Browser, url: str) -> tuple[float, float, dict[str, int]]:
    """Seconds until Write is enabled, kilobytes transferred by then, and the parts of the time."""
    context = browser.new_context()
    context.add_init_script(_NO_EXAMPLE)
    page = context.new_page()
    size = 0
    session = context.new_cdp_session(page)
    session.send("Network.enable")

    def count(event: dict[str, Any]) -> None:
        nonlocal size
        size += event["encodedDataLength"]

    session.on("Network.loadingFinished", count)
    began = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.locator("#write:enabled").wait_for()
    seconds = time.perf_counter() - began
    parts = page.evaluate(_PARTS)
    page.wait_for_load_state("networkidle")
    context.close()
    return seconds, size / 1000, parts


def warm_up(browser: Browser) -> None:
    """Start the processes of the browser and load its fonts: a person's browser runs already."""
    page = browser.new_page()
    page.goto("data:text/html,<p style='font-family: system-ui'>x <i>x</i> <code>x</code>")
    page.screenshot()
    page.close()


def measure_frames(page: Page, num_tokens: int) -> tuple[int, list[float], list[float]]:
    """Write a text at full speed: tokens, milliseconds between frames, and long tasks."""
    settings = f"{{ seed: 1, max_tokens: {num_tokens}, end: false }}"
    actions = "import(new URL('page/code/actions.js', document.baseURI))"
    page.evaluate(f"{actions}.then((m) => m.updateSettings({settings}))")
    page.evaluate(_OBSERVE)
    page.locator("#prompt").fill("Tell me a long story about the sea.")
    page.locator("#prompt").press("Enter")
    page.locator("#pause").wait_for()
    page.locator("#go-on").wait_for(timeout=900_000)
    written = page.locator("#text .t:not(.prompt)").count()
    frames, tasks = page.evaluate("[frames_ms, tasks_ms]")
    return written, frames, tasks


def measure_edit(page: Page) -> dict[str, int]:
    """Type a letter in the middle: ms until it is shown, next tokens are scored, and all are."""
    page.evaluate(_OBSERVE_EDIT)
    page.keyboard.type("x")
    while "all" not in (result := page.evaluate("edit_ms")):
        page.wait_for_timeout(100)
    return dict(result)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--port", type=int, default=8642)
    parser.add_argument("--tab", action="store_true", help="the page of `unspool page --static`")
    given = parser.parse_args()
    url = f"http://127.0.0.1:{given.port}/"
    unspool = [sys.executable, "-m", "unspool"]
    command = [*unspool, "serve", "-m", given.model, "--port", str(given.port)]
    if given.tab:
        folder = tempfile.mkdtemp()
        subprocess.run([*unspool, "page", "--static", folder, "-m", given.model], check=True)
        command = [sys.executable, "-m", "http.server", "-d", folder, str(given.port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(url if given.tab else f"{url}v1/models")
        with sync_playwright() as playwright:
            path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
            arguments = ["--no-sandbox", "--disable-gpu"]
            browser = playwright.chromium.launch(executable_path=path, args=arguments)
            warm_up(browser)
            for _ in range(4):
                seconds, size, parts = measure_cold(browser, url)
                times = ", ".join(f"{name} {value}" for name, value in parts.items())
                print(f"Write enabled after {seconds:.2f} s; {size:.0f} KB; ms: {times}")
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            context.add_init_script(_NO_EXAMPLE)
            page = context.new_page()
            page.goto(url)
            page.locator("#write:enabled").wait_for()
            if given.tab:  # its service worker isolates the page for threads at the next visit
                page.evaluate("navigator.serviceWorker.ready.then(() => null)")
                page.reload()
                page.locator("#write:enabled").wait_for()
            written, frames, tasks = measure_frames(page, given.tokens)
            print(
                f"{written} tokens: frames p50 {percentile(frames, 0.5):.0f} ms, p95 "
                f"{percentile(frames, 0.95):.0f} ms, worst {max(frames):.0f} ms; "
                f"{sum(task > 100 for task in tasks)} tasks over 100 ms, longest "
                f"{max(tasks, default=0):.0f} ms"
            )
            edit = ", ".join(f"{name} {ms} ms" for name, ms in measure_edit(page).items())
            print(f"edit in the middle: {edit}")
            browser.close()
    finally:
        server.terminate()
        server.wait()


def wait_for(url: str) -> None:
    end = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main()
