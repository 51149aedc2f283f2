"""The page without a server: the engine in the browser tab answers as the server does."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from helpers.page_actions import finished, open_panel, open_view, start_writing, tokens
from helpers.page_colors import check_looks
from unspool.errors import UnspoolError
from unspool.page.files import FOLDER
from unspool.page.static import write_static

Json = dict[str, Any]
Ask = Callable[[str, str, Json | None], Any]

# What differs from run to run, or says where the model runs.
VOLATILE = {"id", "branch", "parent", "created", "updated", "session", "seconds", "usage", "last",
            "model", "max_model_len"}  # fmt: skip
# What the tab leaves out of "head"; the page shows nothing for it.
LEFT_OUT = {"norm"}


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@dataclass
class Host:
    """A plain file server."""

    folder: Path
    url: str = ""
    server: Any = None

    def start(self, port: int = 0) -> None:
        handler = functools.partial(QuietHandler, directory=self.folder)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def host(small_default: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("site")
    write_static(folder, small_default)
    host = Host(folder)
    host.start()
    yield host
    host.stop()


@pytest.fixture
def tab(chromium: Any, host: Host) -> Iterator[Page]:
    """The page in a new browser without any state, with its model loaded.

    Without its content security policy, which would also refuse what tests and axe evaluate.
    """
    context: BrowserContext = chromium.browser.new_context(
        viewport={"width": 1280, "height": 800}, bypass_csp=True
    )
    context.add_init_script("localStorage.setItem('unspool.visited', 'true')")  # no example
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(host.url)
    expect(page.locator("#write")).to_be_enabled()
    yield page
    context.close()
    assert not faults


SEND = """async ([method, path, body]) => {
    const { api } = await import(new URL("page/code/api.js", document.baseURI));
    const reply = method === "GET" ? api.get(path) : api.post(path, body ?? {});
    return reply.catch(({ status, code, param }) => ({ status, code, param }));
}"""


FEW_TOKENS = """import(new URL("page/code/state.js", document.baseURI)).then(({ state }) => {
    state.settings.max_tokens = 9;
})"""


def write_little(page: Page, words: str) -> None:
    page.evaluate(FEW_TOKENS)
    start_writing(page, words)


def ask_tab(page: Page) -> Ask:
    def ask(method: str, path: str, body: Json | None) -> Any:
        return page.evaluate(SEND, [method, path, body])

    return ask


def ask_server(server: Any) -> Ask:
    def ask(method: str, path: str, body: Json | None = None) -> Any:
        reply = server.http.request(method, path, json=body)
        if reply.status_code < 400:
            return reply.json()
        error = reply.json()["error"]
        return {"status": reply.status_code, "code": error["code"], "param": error["param"]}

    return ask


def assert_same(tab: Any, server: Any, where: str = "") -> None:
    """The same JSON, up to the last digits of numbers and what differs from run to run."""
    if isinstance(server, dict):
        assert isinstance(tab, dict), where
        ignored = VOLATILE | LEFT_OUT if isinstance(server.get("id", ""), str) else set()
        expected = set(server) - ignored  # the id of a token is a number, and is compared
        assert set(tab) - ignored == expected, f"{where}: {set(tab) ^ set(server)}"
        for name in expected:
            assert_same(tab[name], server[name], f"{where}.{name}")
    elif isinstance(server, list):
        assert isinstance(tab, list) and len(tab) == len(server), f"{where}: {tab} {server}"
        for at, (some, other) in enumerate(zip(tab, server, strict=True)):
            assert_same(some, other, f"{where}[{at}]")
    elif where.endswith(".rank") and server is not None:  # of unlikely tokens, by last digits
        assert tab == pytest.approx(server, abs=1 + server // 100), where
    elif isinstance(server, float) and not isinstance(tab, bool):
        assert tab == pytest.approx(server, rel=1e-3, abs=1e-4), where
    else:
        assert tab == server, where


CHAT = {"messages": [{"role": "user", "content": "Why do leaves change color in fall? 🍁"}],
        "seed": 7, "top": 12}  # fmt: skip
PLAIN = {"prompt": "Once upon a time", "seed": 3, "top": 5, "temperature": 1.0, "top_k": 0}


def requests(ask: Ask) -> Iterator[tuple[str, Any]]:
    """One request of each kind that Write, Step, Inside, Map and Tokenizer send."""

    def post(path: str, body: Json | None = None) -> Any:
        return ask("POST", path, body or {})

    chat = post("/v1/tree", CHAT)
    yield "create", chat
    path = f"/v1/tree/{chat['id']}"
    yield "resume", post(f"{path}/resume", {"max_tokens": 8})
    yield "try", post(f"{path}/try", {"at": 3, "temperature": 1.5, "top_k": 20, "top": 30})
    yield (
        "append a turn",
        post(f"{path}/append", {"message": {"role": "user", "content": "And now?"}}),
    )
    yield "resume a chat", post(f"{path}/resume", {"max_tokens": 4, "repetition_penalty": 1.3})
    yield "whole", ask("GET", path, None)
    yield "edit a turn", post(f"{path}/edit", {"first": 38 + 12, "last": 38 + 13, "text": " Or"})
    yield (
        "edit the prompt",
        post(f"{path}/edit", {"first": 26, "last": 27, "text": "How", "score": False}),
    )
    plain = post("/v1/tree", PLAIN)
    path = f"/v1/tree/{plain['id']}"
    yield "plain", plain
    yield "long", post(f"{path}/resume", {"max_tokens": 12})
    yield "fork", post(f"{path}/fork", {"at": 5, "name": "five"})
    chosen = post(f"{path}/choose", {"at": 4, "text": " small green"})
    yield "choose text", chosen
    yield "choose a token", post(f"{path}/choose", {"at": -1, "token": 260, "fork": False})
    yield (
        "drop",
        post(f"{path}/edit", {"first": 6, "last": 7, "text": " other words", "after": "drop"}),
    )
    edited = post(f"{path}/edit", {"first": 6, "last": 7, "text": " other", "score": False})
    yield "keep", edited
    yield "score", post(f"/v1/tree/{edited['id']}/score")
    yield "scored", ask("GET", f"/v1/tree/{edited['id']}", None)
    yield "samples", post(f"{path}/resume", {"n": 2, "max_tokens": 3, "seed": 5})
    yield "rewind", post(f"{path}/rewind", {"to": 2})
    yield (
        "stop string",
        post(f"{path}/resume", {"max_tokens": 9, "stop": ["e", "zz"], "temperature": 0}),
    )
    yield "look", ask("GET", f"{path}/look?at=3&include=attention,vectors&top=4&heads=true", None)
    yield "lens", ask("GET", f"{path}/look?step=1&include=lens&top=3", None)
    yield "futures", post(f"{path}/futures", {"mass": 0.02, "depth": 3, "nodes": 20})
    yield "sampled futures", post(f"{path}/futures", {"mass": 0.02, "depth": 2, "sampled": True})
    for text in ("def f(x):\n\treturn x", "Grüße! 你好 👩‍👩‍👧"):
        body = {"content": text, "parse_special": False, "with_pieces": True, "merges": True}
        yield f"tokens of {text}", post("/tokenize", body)
    yield "not a branch", ask("GET", "/v1/tree/branch-0", None)
    yield "out of range", post(f"{path}/fork", {"at": 99})
    yield "nothing to append", post(f"{path}/append")
    yield "bad setting", post(f"{path}/resume", {"top_p": 2})


def test_the_folder_has_what_the_page_needs_and_no_more(tmp_path: Path) -> None:
    address = "https://example.org/model.gguf"
    size, compressed = write_static(tmp_path / "site", address)
    site = tmp_path / "site"
    assert compressed < 600_000
    assert address in (site / "index.html").read_text("utf-8") and not (site / "model").exists()
    worker = (site / "sw.js").read_text("utf-8")
    names = set(json.loads(re.findall(r"const FILES = (.*);", worker)[0]))
    written = {file.relative_to(site).as_posix() for file in site.rglob("*") if file.is_file()}
    assert names - {"./"} == written - {"index.html", "sw.js"}
    assert size == sum((site / name).stat().st_size for name in written) <= 1_000_000
    server_only = set(_views(r"[^\n]*needsServer"))
    for name in ("code/write/rewrite.js", "code/steer/panel.js", "style/training.css"):
        assert (FOLDER / name).is_file() and not (site / "page" / name).exists(), name
    for path in (site / "page").rglob("*.js"):
        for name in re.findall(r"""from ?["'](\.[^"']+)""", path.read_text("utf-8")):
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"
    code = site / "page" / "code"
    for name in _views(""):
        assert (code / name).is_file() or name in server_only, name
    write_static(site, address)  # again, over the page before
    with pytest.raises(UnspoolError, match="has other files"):
        write_static(tmp_path, address)
    with pytest.raises(UnspoolError, match="https address of a GGUF file"):
        write_static(site, "http://example.org/model.bin")


def _views(ending: str) -> list[str]:
    views = (FOLDER / "code" / "views.js").read_text("utf-8")
    return re.findall(r'file: "\./([^"]+)"' + ending, views)


def test_the_tab_answers_as_the_server(tab: Page, small_server: Any) -> None:
    answers = dict(requests(ask_tab(tab)))
    for name, answer in requests(ask_server(small_server)):
        assert_same(answers[name], answer, name)


@pytest.mark.slow
def test_fifty_texts_are_those_of_the_command_line(
    chromium: Any, default_model: Path, real_lm: Any, tmp_path: Path
) -> None:
    """The same seeds write the same tokens: Unspool's guarantee, across WebAssembly."""
    write_static(tmp_path, default_model)
    host = Host(tmp_path)
    host.start()
    context = chromium.browser.new_context()
    context.add_init_script("localStorage.setItem('unspool.visited', 'true')")
    page = context.new_page()
    try:
        page.goto(host.url)
        expect(page.locator("#write")).to_be_enabled(timeout=60_000)
        ask = ask_tab(page)
        names = ("a cat", "the sea", "my king", "old maps", "rain")
        for seed in range(50):
            prompt = f"Tell me of {names[seed % 5]}"
            settings = {
                "temperature": 0.5 + seed / 50,
                "top_k": seed,
                "max_tokens": 3,
                "seed": seed,
            }
            created = ask(
                "POST", "/v1/tree", {"prompt": prompt, "trace": False, "top": 0, **settings}
            )
            answer = ask("POST", f"/v1/tree/{created['id']}/resume", {})
            expected = real_lm.generate(prompt, **settings).tokens
            assert [step["token"] for step in answer["steps"]] == expected, (prompt, settings)
    finally:
        context.close()
        host.stop()


def test_write_choose_and_reload_without_a_network(chromium: Any, host: Host) -> None:
    """Writing in the page; after a reload without any server, the text is there and continues."""
    other = Host(host.folder)
    other.start()
    context = chromium.browser.new_context(viewport={"width": 1280, "height": 800})
    context.add_init_script("localStorage.setItem('unspool.visited', 'true')")
    page = context.new_page()
    try:
        page.goto(other.url)
        expect(page.locator("#write")).to_be_enabled()
        write_little(page, "Name three planets.")
        finished(page)
        written = tokens(page).all_inner_texts()
        tokens(page).nth(3).click()
        page.locator("#side-panel .candidate:not(.picked)").first.click()
        expect(page.locator("#text .t.chosen")).to_have_count(1)
        finished(page)
        page.get_by_role("button", name="Undo").click()
        expect(tokens(page)).to_have_text(written)
        page.evaluate("navigator.serviceWorker.ready.then(() => null)")
        other.stop()
        page.reload()
        expect(tokens(page)).to_have_text(written)
        page.locator("#one-step").click()
        expect(tokens(page)).to_have_count(len(written) + 1)
    finally:
        context.close()


def test_a_link_opens_the_text(tab: Page, host: Host) -> None:
    write_little(tab, "Once upon a time")
    finished(tab)
    tokens(tab).nth(4).click()
    tab.locator("#side-panel .candidate:not(.picked)").first.click()
    expect(tab.locator("#text .t.chosen")).to_have_count(1)
    finished(tab)
    written = tokens(tab).all_inner_texts()
    link = tab.evaluate(
        """async () => {
        const { linkOf } = await import(new URL("page/code/share/link.js", document.baseURI));
        const { state } = await import(new URL("page/code/state.js", document.baseURI));
        return linkOf(state.current);
    }"""
    )
    assert link.startswith(host.url + "#text=") and len(link) < 1000
    other = tab.context.new_page()
    other.goto(link)
    expect(tokens(other)).to_have_text(written)
    expect(other.locator("#fault")).to_have_count(0)
    other.close()
    other = tab.context.new_page()
    other.goto(link[:-9])
    expect(other.locator("#fault")).to_contain_text("damaged")


def test_the_page_works_below_a_path(chromium: Any, host: Host, tmp_path: Path) -> None:
    """As on GitHub Pages: no address starts at the root of the host, not even offline."""
    (tmp_path / "some" / "dir").mkdir(parents=True)
    (tmp_path / "some" / "dir" / "site").symlink_to(host.folder)
    other = Host(tmp_path)
    other.start()
    context = chromium.browser.new_context()
    context.add_init_script("localStorage.setItem('unspool.visited', 'true')")
    page = context.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    missing: list[str] = []
    page.on("response", lambda answer: missing.append(answer.url) if answer.status > 399 else None)
    try:
        page.goto(f"{other.url}some/dir/site/")
        expect(page.locator("#write")).to_be_enabled()
        page.evaluate("navigator.serviceWorker.ready.then(() => null)")
        other.stop()
        page.reload()
        expect(page.locator("#write")).to_be_enabled()
        write_little(page, "Name three planets.")
        finished(page)
        assert not missing
        folders = (f"{other.url}some/dir/site/", "blob:")
        assert all(url.startswith(folders) for url in requests), requests
    finally:
        context.close()


def test_the_second_visit_has_threads(chromium: Any, host: Host) -> None:
    """The service worker isolates the page. The text with the same seed is the same."""
    context = chromium.browser.new_context(bypass_csp=True)
    context.add_init_script("localStorage.setItem('unspool.visited', 'true')")
    page = context.new_page()
    texts, devices = [], []
    try:
        for is_isolated in (False, True):
            page.goto(host.url)
            expect(page.locator("#write")).to_be_enabled()
            assert page.evaluate("crossOriginIsolated") == is_isolated
            ask = ask_tab(page)
            devices.append(ask("GET", "/v1/models", None)["data"][0]["unspool"]["device"])
            created = ask("POST", "/v1/tree", CHAT)
            texts.append(ask("POST", f"/v1/tree/{created['id']}/resume", {"max_tokens": 8}))
            page.evaluate("navigator.serviceWorker.ready.then(() => null)")
        count = min(4, page.evaluate("navigator.hardwareConcurrency"))
        assert "1 thread)" in devices[0] and f"{count} thread" in devices[1]
        assert_same(texts[1], texts[0])
    finally:
        context.close()


DROP = """() => {
    const [file] = document.querySelector("#dropped").files;
    const items = new DataTransfer();
    items.items.add(file);
    for (const name of ["dragover", "drop"]) {
        const event = new DragEvent(name, { dataTransfer: items, bubbles: true, cancelable: true });
        document.querySelector("#view").dispatchEvent(event);
        if (!event.defaultPrevented) throw new Error(`the browser would open the file (${name})`);
    }
}"""


def test_a_model_file_can_be_dropped(tab: Page, small_default: Path, tmp_path: Path) -> None:
    model = tmp_path / "another-model.gguf"
    shutil.copyfile(small_default, model)
    tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<input type=file id=dropped>')")
    tab.locator("#dropped").set_input_files(model)
    tab.evaluate(DROP)
    expect(tab.locator("#model")).to_contain_text("another-model")
    expect(tab.locator("#write")).to_be_enabled()
    write_little(tab, "Once")
    finished(tab)


def test_a_model_file_can_be_chosen(tab: Page, small_default: Path) -> None:
    tab.locator("#model").click()
    dialog = tab.get_by_role("dialog", name="The model in this tab")
    expect(dialog).to_contain_text("4 layers")
    expect(dialog).to_contain_text("need a server")
    with tab.expect_file_chooser() as chooser:
        dialog.locator("#open-gguf").click()
    chooser.value.set_files(small_default)
    tab.keyboard.press("Escape")
    expect(tab.locator("#write")).to_be_enabled()
    write_little(tab, "Once")
    finished(tab)


def test_what_cannot_run_is_said(tab: Page, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"not a model")
    tab.locator("#model").click()
    with tab.expect_file_chooser() as chooser:
        tab.locator("#open-gguf").click()
    chooser.value.set_files(damaged)
    expect(tab.locator("#tab-fault")).to_be_visible()
    tab.keyboard.press("Escape")
    tab.locator("#tab-fault").get_by_role("button", name="Try again").click()
    expect(tab.locator("#write")).to_be_enabled()


def test_looks(tab: Page) -> None:
    """The views that differ from those with a server, in every size and theme."""
    write_little(tab, "Once upon a time")
    finished(tab)
    tokens(tab).nth(4).click()
    open_panel(tab, "Inside")
    tab.locator("#inside-fold").click()
    expect(tab.locator(".inside-way")).to_be_visible()
    expect(tab.locator(".inside-lens")).to_be_visible()
    open_panel(tab, "Settings")
    expect(tab.get_by_role("switch", name="KV cache")).to_be_visible()
    expect(tab.get_by_role("tab", name="Context")).to_have_count(0)
    open_view(tab, "Costs of a text")
    expect(tab.locator(".missing")).to_have_text("Training runs, Cost report: with a server")
    tab.locator("#model").click()
    check_looks(tab, "tab-model")
