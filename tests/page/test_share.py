"""Sharing: a session comes back token for token, a picture and a text are right, programs run."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
import struct
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error, FilePayload, Locator, Page, Route, expect

import unspool
from helpers.page_actions import (
    address_of,
    branch,
    finished,
    open_panel,
    set_settings,
    text,
    tokens,
    until,
    use_settings,
    write,
)

SAME = "all tokens are the same"
STATE = "import('/page/code/state.js').then(({state}) => %s)"
TREE = """[...state.branches.values()].map((branch) => ({
    name: branch.name, forked_at: branch.forked_at, seed: branch.seed,
    parent: state.branches.get(branch.parent)?.name ?? null,
    prompt: branch.prompt.tokens, messages: branch.prompt.messages, text: branch.text,
    steps: branch.steps.map((step) => [step.token, step.chosen]),
    runs: branch.runs, retracted: branch.retracted.map(({ at, steps }) => [at, steps.length]),
}))"""
IS_SAVED = """fetch(`/v1/tree/sessions/${state.session}`).then((answer) => answer.json())
    .then(({view}) => view.current === state.current)"""  # what the session shows


def share(page: Page) -> Locator:
    page.get_by_role("button", name="Share", exact=True).click()
    dialog = page.get_by_role("dialog", name="Share")
    expect(dialog).to_be_visible()
    return dialog


def close(page: Page) -> None:
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Share")).to_have_count(0)


def downloaded(page: Page, button: Locator, folder: Path) -> Path:
    with page.expect_download() as download:
        button.click()
    file = folder / download.value.suggested_filename
    download.value.save_as(file)
    return file


def saved(page: Page, folder: Path) -> Path:
    file = downloaded(page, share(page).get_by_role("button", name="Save"), folder)
    close(page)
    return file


def unpacked(page: Page, file: Path) -> dict[str, Any]:
    """A saved session with an object for each step, as the page has it in memory; it loads too."""
    expand = "(text) => import('/page/code/share/file.js').then((m) => m.expand(JSON.parse(text)))"
    result: dict[str, Any] = page.evaluate(expand, gzip.decompress(file.read_bytes()).decode())
    return result


_saved_sessions: dict[str, str] = {}  # by the address of the page


@pytest.fixture
def session(page: Page, address: str, tmp_path: Path) -> dict[str, Any]:
    """A text of six tokens, saved; the page was opened anew since, and knows nothing of it."""
    if address not in _saved_sessions:
        write(page, "Once upon a time", max_tokens=6, seed=3)
        _saved_sessions[address] = json.dumps(unpacked(page, saved(page, tmp_path)))
        begin_anew(page)
    result: dict[str, Any] = json.loads(_saved_sessions[address])
    return result


def as_file(content: Any) -> FilePayload:
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
    return {"name": "a.json", "mimeType": "application/json", "buffer": text.encode()}


def load(page: Page, file: Path | FilePayload) -> Locator:
    """Choose a file in the dialog; gives what the dialog says of it."""
    dialog = page.get_by_role("dialog", name="Share")
    if not dialog.is_visible():
        share(page)
    with page.expect_file_chooser() as chooser:
        dialog.get_by_role("button", name="Load").click()
    chooser.value.set_files(file)
    return dialog.locator(".share-news")


def tree(page: Page) -> list[dict[str, Any]]:
    """All branches that the page has, with their steps."""
    result: list[dict[str, Any]] = page.evaluate(STATE % TREE)
    return sorted(result, key=lambda item: item["name"] or "")


def name_it(page: Page, name: str) -> None:
    page.evaluate(
        """async (name) => {
            const { renameBranch } = await import("/page/code/actions.js");
            const { state } = await import("/page/code/state.js");
            await renameBranch(state.current, name);
        }""",
        name,
    )


def begin_anew(page: Page) -> None:
    """As on another day: the server knows nothing of what was written."""
    address = address_of(page)
    # Neither the tab nor the address names a text: the page would ask for it, and get 404.
    page.evaluate("() => { Storage.prototype.setItem = () => {}; sessionStorage.clear(); }")
    for reply in page.request.get(f"{address}/v1/tree").json()["data"]:
        page.request.delete(f"{address}/v1/tree/{reply['id']}")
    page.goto(f"{address}/")
    expect(page.locator("#write")).to_be_enabled()
    page.evaluate("sessionStorage.clear()")
    assert tree(page) == []


def write_in_session(page: Page, prompt: str, **settings: Any) -> None:
    """Another prompt in the session that is open; "New" would open another session."""
    use_settings(page, **settings)
    page.evaluate(
        """async (prompt) => {
            const { setMode, writePrompt } = await import("/page/code/actions.js");
            const { state } = await import("/page/code/state.js");
            setMode("plain");
            state.draft = prompt;
            await writePrompt();
        }""",
        prompt,
    )
    finished(page)
    open_panel(page, "Sampling")


def other_candidate(page: Page, at: int) -> None:
    """Click a token, and then another one than was picked there."""
    tokens(page).nth(at).click()
    panel = open_panel(page, "Sampling")
    panel.get_by_role("button", name=re.compile("^Continue with (?!.*sampled)")).first.click()
    expect(tokens(page).nth(at)).to_have_class(re.compile("chosen"))
    finished(page)


# -- sessions ----------------------------------------------------------------------------------


def test_a_session_comes_back_token_for_token(page: Page, tmp_path: Path) -> None:
    write(page, "Why do leaves change color?", mode="chat", max_tokens=12, seed=11)
    name_it(page, "first")
    other_candidate(page, 4)
    name_it(page, "second")
    set_settings(page, temperature=0.2, max_tokens=6)
    page.locator("#go-on").click()
    finished(page)
    write_in_session(page, "Once upon a time, it's said,", max_tokens=8, seed=3)
    name_it(page, "third")
    page.locator("#tint").select_option("entropy")
    tokens(page).nth(2).click()
    file = saved(page, tmp_path)
    assert re.fullmatch(r"unspool-\d{4}-\d\d-\d\d-[a-z]+\.json\.gz", file.name)
    session = unpacked(page, file)
    assert session["unspool_session"] == 2
    assert file.stat().st_size * 5 < len(json.dumps(session, separators=(",", ":")))
    assert session["model"]["system_fingerprint"].startswith("fp_")
    before, displayed = tree(page), text(page)
    assert [item["name"] for item in before] == ["first", "second", "third"]
    chosen = [[n for n, (_, chosen) in enumerate(item["steps"]) if chosen] for item in before]
    assert chosen == [[], [4], []]

    begin_anew(page)
    expect(load(page, file)).to_contain_text(f"Replayed 3 branches, 39 tokens: {SAME}.")
    page.get_by_role("button", name="Show the text").click()
    assert tree(page) == before
    assert text(page) == displayed == branch(page)["text"]
    assert branch(page)["name"] == "third"
    expect(page.locator("#tint")).to_have_value("entropy")
    expect(tokens(page).nth(2)).to_have_class(re.compile("selected"))
    page.locator("#go-on").click()  # it lives
    finished(page)
    assert tokens(page).count() > 8


@pytest.mark.slow
def test_what_a_guard_took_back_is_taken_back_again(page: Page, tmp_path: Path) -> None:
    guard = "pattern=.{12}"  # of several tokens
    write(page, "The sea", max_tokens=40, seed=1, temperature=0, guard=guard)
    before = tree(page)
    assert before[0]["retracted"]
    file = saved(page, tmp_path)
    begin_anew(page)
    expect(load(page, file)).to_contain_text(SAME)
    assert tree(page) == before


def test_a_changed_file_is_shown_as_recorded(page: Page, session: dict[str, Any]) -> None:
    """Words that the model did not write: said, shown as text, and nothing of them is HTML."""
    evil = '<img src=x onerror="window.hurt=1"><script>window.hurt=2</script>'
    step = session["branches"][0]["steps"][2]
    step |= {"token": 5, "text": evil, "piece": evil}
    step["candidates"][0]["text"] = session["branches"][0]["name"] = evil
    session["branches"][0]["prompt"]["tokens"][0]["text"] = evil
    news = load(page, as_file(session))
    expect(news).to_contain_text("differs from token 3 on")
    expect(news).to_contain_text("shown as recorded")
    page.get_by_role("button", name="Show the text").click()
    expect(tokens(page).nth(2)).to_have_text(evil)
    tokens(page).nth(2).click()
    open_panel(page, "Sampling")
    open_panel(page, "Branches")
    expect(page.locator("#go-on")).to_be_disabled()
    assert page.evaluate("window.hurt") is None
    assert page.locator("img[src=x]").count() == 0


def test_bad_files_are_refused_in_words(page: Page, session: dict[str, Any]) -> None:
    complete = json.dumps(session, separators=(",", ":"))
    (branch,) = session["branches"]

    def changed(**parts: Any) -> str:
        return json.dumps({**session, "branches": [{**branch, **parts}]})

    step = branch["steps"][0]
    bad = {
        complete[: len(complete) // 2]: "truncated",
        "[1, 2, 3]": "of no known kind",
        '{"hello": 1}': "of no known kind",
        complete.replace('"unspool_session":2', '"unspool_session":99'): "version 99",
        changed(seed="<b>7</b>"): 'seed must be an integer, got "<b>7</b>"',
        changed(steps=[{**step, "logprob": "low"}]): "steps[0].logprob",
        changed(steps=[{**step, "index": 7}]): "no step 0",
        changed(parent="branch-nobody"): "no parent before it",
        changed(steps={"tokens": [9**9]}): "names no token of the vocabulary",
        changed(steps={"tokens": 3}): "branches[0].steps.tokens must be an array",
        changed(id=None): "branches[0].id must be a string, got null",
        complete.replace('"seed":', '"__proto__":{"hurt":1},"seed":'): "__proto__",
    }
    for content, words in bad.items():
        expect(load(page, as_file(content)).get_by_role("alert")).to_contain_text(words)
    binary: FilePayload = {**as_file(""), "buffer": b"\x89PNG\r\n\x1a\n\xff"}
    expect(load(page, binary).get_by_role("alert")).to_contain_text("not UTF-8 text")
    packed = gzip.compress(complete.encode())
    damaged: FilePayload = {**as_file(""), "buffer": packed[: len(packed) // 2]}
    expect(load(page, damaged).get_by_role("alert")).to_contain_text("cannot be decompressed")
    bomb: FilePayload = {**as_file(""), "buffer": gzip.compress(b" " * (257 << 20), 9)}
    expect(load(page, bomb).get_by_role("alert")).to_contain_text("more than 256 MB")
    assert page.evaluate("({}).hurt") is None
    assert tree(page) == []


def test_another_model_is_said_before(page: Page, session: dict[str, Any]) -> None:
    other = {**session, "model": {**session["model"], "system_fingerprint": "fp_other"}}
    news = load(page, as_file(other))
    expect(news).to_contain_text("another build")
    news.get_by_role("button", name="Replay anyway").click()
    expect(news).to_contain_text(SAME)
    close(page)
    session["branches"][0]["model"] = "somebody-else"
    news = load(page, as_file(session))
    expect(news).to_contain_text("somebody-else, which this server does not have")
    news.get_by_role("button", name="Show the recording").click()
    expect(news).to_contain_text("shown as recorded")
    close(page)
    assert tokens(page).count() == 6
    page.get_by_role("button", name="Share", exact=True).click()
    page.get_by_role("button", name="Play at ×4").click()
    expect(page.get_by_role("group", name="Playing")).to_have_count(0)
    assert tokens(page).count() == 6


def test_a_server_that_goes_in_the_middle(
    page: Page, session: dict[str, Any], expected_errors: list[str]
) -> None:
    expected_errors.append("ERR_FAILED")
    page.route("**/resume", lambda route: route.abort())
    news = load(page, as_file(session))
    expect(news.get_by_role("alert")).to_contain_text("The server does not answer")
    page.unroute("**/resume")
    news.get_by_role("button", name="Try again").click()
    expect(news).to_contain_text(SAME)
    steps = session["branches"][0]["steps"]
    assert tree(page)[0]["steps"] == [[step["token"], step["chosen"]] for step in steps]
    # The same, cancelled.
    close(page)
    begin_anew(page)
    pending: list[Route] = []
    page.route("**/resume", lambda route: pending.append(route))  # not answered
    news = load(page, as_file(session))
    news.get_by_role("button", name="Cancel").click()
    expect(news).to_contain_text("Cancelled. Nothing has changed.")
    assert tree(page) == []
    for route in pending:
        with contextlib.suppress(Error):  # the request was given up
            route.abort()


def test_playing(page: Page) -> None:
    """The text comes once more, without the server."""
    write(page, "Once upon a time", max_tokens=24, seed=3)
    slow = "import('/page/code/state.js').then((m) => m.currentBranch().steps.forEach(%s))"
    until(page, STATE % IS_SAVED)
    page.evaluate(slow % "(step) => { step.seconds = 0.1; }")  # ends after the click on ×4 below
    complete, there = text(page), tree(page)
    requested_urls: list[str] = []
    page.on("request", lambda request: requested_urls.append(request.url))
    share(page).get_by_role("button", name="Play at ×¼").click()
    bar = page.get_by_role("group", name="Playing")
    expect(bar).to_be_visible()
    assert complete.startswith(text(page)) and tokens(page).count() < 24
    # The address, and what a reload shows, name the text and not the copy that is played.
    address, entries = page.url, page.evaluate("history.length")
    saved = "JSON.parse(sessionStorage.getItem('unspool.session')).current"
    until(page, "document.querySelector('#text').dataset.branch.endsWith('-played')")
    page.wait_for_timeout(400)  # it is saved after 300 ms
    assert page.evaluate(saved) in page.url
    bar.get_by_role("button", name="×4").click()
    expect(bar).to_have_count(0)
    expect(tokens(page)).to_have_count(24)
    assert text(page) == complete and tree(page) == there
    assert (page.url, page.evaluate("history.length")) == (address, entries)
    assert not [url for url in requested_urls if "/v1/" in url]


# -- pictures and the text ---------------------------------------------------------------------


def test_pictures_and_markdown(page: Page, tmp_path: Path) -> None:
    write(page, "Why do leaves change color?", mode="chat", max_tokens=12, seed=7)
    tokens(page).nth(3).click()
    expect(page.locator("#side-panel")).to_contain_text("in the vocabulary")
    displayed = text(page)
    dialog = share(page)
    svg = downloaded(page, dialog.get_by_role("button", name="SVG"), tmp_path)
    png = downloaded(page, dialog.get_by_role("button", name="PNG"), tmp_path)
    assert svg.suffix == ".svg" and png.suffix == ".png"
    picture = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    words = [item.text or "" for item in picture.iter(f"{space}text")]
    assert re.sub(r"\s", "", displayed) in re.sub(r"\s", "", "".join(words))
    assert any("in the vocabulary" in item for item in words)
    assert len(list(picture.iter(f"{space}rect"))) > 20
    assert not list(picture.iter(f"{space}foreignObject"))
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (math.ceil(2 * width), math.ceil(2 * height))
    assert len(data) > 30_000  # not an empty sheet
    close(page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    write(page, "# Five * stars_\n<b>1. done</b>", mode="chat", max_tokens=16, seed=7)
    reply = branch(page)
    dialog = share(page)
    file = downloaded(page, dialog.get_by_role("button", name="Markdown"), tmp_path)
    result = file.read_text(encoding="utf-8")
    dialog.locator("#copy-markdown").click()
    expect(dialog.locator("#copy-markdown")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == result
    assert "> \\# Five \\* stars\\_\\\n> \\<b\\>1. done\\</b\\>" in result
    assert f"| seed | `{reply['seed']}` |" in result
    assert f"| model | `{reply['model']}` |" in result and "| fingerprint | `fp_" in result
    assert "## The least likely tokens" in result
    plain = re.sub(r"\\([^a-zA-Z0-9\s])", r"\1", result)
    assert reply["text"].strip().split("\n")[0] in plain


# -- programs ----------------------------------------------------------------------------------

QUOTES = "Don't say 'no' to \"it\" & $HOME `x` \\ !"


def program(dialog: Locator, name: str) -> str:
    dialog.get_by_role("tab", name=name).click()
    return dialog.locator("#program pre").inner_text()


def run_shell(code: str) -> dict[str, Any]:
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_python(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    exec(compile(code, "a program of the page", "exec"), {})
    return capsys.readouterr().out.removesuffix("\n")


@pytest.mark.parametrize("mode", ["chat", "plain"])
def test_programs_give_the_same_text(
    mode: str,
    page: Page,
    lm: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(page, QUOTES, mode=mode, max_tokens=14, seed=5, temperature=0.9, min_p=0.1, guard="loop")
    reply = branch(page)
    dialog = share(page)
    (choice,) = run_shell(program(dialog, "curl"))["choices"]
    assert (choice["message"]["content"] if mode == "chat" else choice["text"]) == reply["text"]
    assert run_python(program(dialog, "Python, openai"), capsys) == reply["text"]
    code = program(dialog, "Python, unspool")
    assert "unspool.load(" in code and "top_k" not in code
    monkeypatch.setattr(unspool, "load", lambda *_: lm)
    assert run_python(code, capsys) == reply["text"]


def test_programs_with_words_of_a_person(
    page: Page, lm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(page, QUOTES, mode="chat", max_tokens=10, seed=5)
    other_candidate(page, 4)
    set_settings(page, temperature=0.1, max_tokens=5)
    page.locator("#go-on").click()
    finished(page)
    reply = branch(page)
    assert reply["length"] == 20 and reply["steps"][4]["chosen"]
    dialog = share(page)
    answer = run_shell(program(dialog, "curl"))
    assert answer["text"] == reply["text"]
    page.request.delete(f"{address_of(page)}/v1/tree/{answer['id']}")
    monkeypatch.setattr(unspool, "load", lambda *_: lm)
    assert run_python(program(dialog, "Python, unspool"), capsys) == reply["text"]
    dialog.get_by_role("tab", name="Python, openai").click()
    expect(dialog.locator("#program")).to_contain_text("chosen by hand")
    assert dialog.locator("#program pre").count() == 0


def test_a_file_can_be_dropped(page: Page) -> None:
    share(page)
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["{}"], "a.json"));
            const how = { dataTransfer: data, bubbles: true, cancelable: true };
            document.querySelector("#share-title").dispatchEvent(new DragEvent("drop", how));
        }"""
    )
    expect(page.locator("#session-fault")).to_contain_text("of no known kind")
    close(page)
    dialog = share(page)
    expect(dialog).to_contain_text("Generate a text first")
    expect(dialog.get_by_role("button", name="Save")).to_be_disabled()
    expect(dialog.get_by_role("button", name="Load")).to_be_enabled()
    close(page)
    expect(page.get_by_role("button", name="Share", exact=True)).to_be_focused()
