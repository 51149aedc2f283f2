"""Files of other programs: samples as those programs write them, and texts that come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, expect

from helpers.foreign_files import LOOM, MIKUPAD, OPENLOOM, OPENLOOM_2, TAVERN, lines
from helpers.page_actions import address_of, finished, write
from unspool.store.formats import read_texts

MODULE = "import('/page/code/share/formats.js')"
PATHS = """(trees) => trees.map((tree) => m.pathsOf(tree).map(
    (path) => path.map(({role, text}) => [role, text])))"""
READ = f"""async ([text, name]) => {{
    const m = await {MODULE};
    try {{
        const {{format, trees, notes}} = m.readTexts(text, name);
        return {{format, notes, chats: trees.map((tree) => tree.isChat), paths: ({PATHS})(trees)}};
    }} catch (error) {{
        if (!(error instanceof m.BadFile)) throw error;
        return {{fault: error.message}};
    }}
}}"""
WRITTEN = f"""async ([format, tree]) => {{
    const m = await {MODULE};
    const words = m.FORMATS[format].write(tree, {{now: '2026-11-18T12:00:00Z'}});
    return [words, m.lossesOf(format, tree), ({PATHS})([tree])[0]];
}}"""
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


def read(page: Page, content: Any, name: str = "a.json") -> Any:
    words = content if isinstance(content, str) else json.dumps(content)
    return page.evaluate(READ, [words, name])


def node(role: str, words: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "text": words, "children": [*children]}


TALK = [[[SYSTEM, "Be brief."], [USER, "Hi"], [ASSISTANT, "Hello."]],
        [[SYSTEM, "Be brief."], [USER, "Hi"], [ASSISTANT, "Yes?"]]]  # fmt: skip


def test_samples_of_each_program(page: Page) -> None:
    before = [[ASSISTANT, "*You wake.* Hello!"], [USER, "Where am I?"]]
    tavern = read(page, TAVERN, "Seraphina.jsonl")
    assert tavern["format"] == "sillytavern" and tavern["notes"] == ["Left out: 1 hidden message."]
    assert tavern["paths"] == [[
        [*before, [ASSISTANT, "In a forest."]],
        [*before, [ASSISTANT, "In the glade."], [USER, "Thanks!"]],
        [*before, [ASSISTANT, "Safe."]],
    ]]  # fmt: skip
    mikupad = read(page, MIKUPAD)
    story = [[[USER, "Once upon"], [ASSISTANT, " a time"], [USER, ", said I"]]]
    assert mikupad["paths"] == [story] and mikupad["chats"] == [False]
    assert mikupad["notes"] == []
    chunks = json.loads(MIKUPAD["prompt"])
    all_of_it = {"Sessions": [{"key": 1, "value": {"prompt": chunks}}, {"key": "x", "value": 3}],
                 "Names": [{"key": 1, "value": "A"}], "Templates": [], "Themes": []}  # fmt: skip
    assert read(page, all_of_it)["paths"] == [story]
    loom = read(page, LOOM)
    assert loom["chats"] == [False]
    assert [[words for _, words in path] for path in loom["paths"][0]] == [
        ["The sea", " was calm."], ["The sea", " rose."]]  # fmt: skip
    assert read(page, LOOM["root"])["paths"] == loom["paths"]
    for content in (OPENLOOM, OPENLOOM_2):
        result = read(page, content)
        assert (result["format"], result["paths"]) == ("openloom", [TALK])
    assert read(page, OPENLOOM_2)["notes"] == ["Left out: 1 image or sound."]


def test_conversations_and_texts(page: Page) -> None:
    sharegpt = [
        {
            "id": "1",
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": who}],
        }
        for who in ("Hello.", "Yes?")
    ]
    path = [[[USER, "Hi"], [ASSISTANT, "Hello."]], [[USER, "Hi"], [ASSISTANT, "Yes?"]]]
    for content in (json.dumps(sharegpt), lines(*sharegpt)):
        assert read(page, content) == {
            "format": "sharegpt", "notes": [], "chats": [True], "paths": [path]}  # fmt: skip
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts},
                {"role": "assistant", "content": "Hello."}]  # fmt: skip
    forms: list[Any] = [messages, {"messages": messages}]
    for content in (*forms, lines({"messages": messages}, {"x": 1})):
        result = read(page, content)
        assert result["format"] == "messages" and result["paths"] == [TALK[:1]]
        assert "Left out: 1 image or tool call." in result["notes"]
    others = lines({"messages": messages[1:]}, {"messages": [{"role": "user", "content": "Bye"}]})
    assert len(read(page, others)["paths"]) == 2  # two prompts
    markdown = "# A talk\n\n## user\n\nHi\n\n## assistant\n\nHello.\n\n\\## user\n"
    assert read(page, markdown, "a.md")["paths"] == [
        [[[USER, "Hi"], [ASSISTANT, "Hello.\n\n## user"]]]
    ]
    prose = "# A story\r\n\r\nThe sea.\n"
    assert read(page, prose, "a.md")["paths"] == [[[[USER, prose]]]]
    assert read(page, "just words", "a.txt")["format"] == "text"


def test_bad_files_of_others(page: Page) -> None:
    loop = {**OPENLOOM, "nodes": {**OPENLOOM["nodes"], "2": {
        **OPENLOOM["nodes"]["2"], "childrenIds": ["1"]}}}  # fmt: skip
    bad: list[tuple[Any, str]] = [
        ("{", "truncated"),
        ("", "not valid JSON"),
        ("a\0b", "null characters"),
        (TAVERN + '\n{"name": "You", "mes": "cut', "line 7 is not valid JSON"),
        ({"hello": 1}, "of no known kind"),
        (loop, "two parents or is its own ancestor"),
        ({**OPENLOOM, "rootNodeId": "__proto__"}, "names no node"),
        ({**OPENLOOM, "nodes": {"1": {"text": 7, "author": "user"}}}, "must be a string, got 7"),
        ({"root": {"text": "", "children": [{"text": [], "children": []}]}}, "must be a string"),
        ({"root": {"text": "", "children": [3]}}, "must be an object, got 3"),
        ({**MIKUPAD, "prompt": "[1,"}, "prompt is not valid JSON in a string"),
        ([{"messages": [{"role": "robot", "content": "x"}]}], 'must be a role, got "robot"'),
        ([{"messages": [{"role": "user", "content": str(n)}]} for n in range(300)], "at most 200"),
        ({"children": [{"text": "x", "children": []}] * 6000, "text": ""}, "at most 5000"),
        ('{"children":[' * 9000 + "]}" * 9000, "at most 5000"),
    ]
    for content, words in bad:
        assert words in read(page, content)["fault"]
    deep = '{"text":"x","children":[' * 4000 + "]}" * 4000  # recursion would end here
    (paths,) = read(page, deep)["paths"]
    assert len(paths) == 1 and len(paths[0]) == 4000
    assert page.evaluate("({}).polluted") is None


CHAT = {"title": "Talk", "isChat": True, "model": "m", "children": [
    node(SYSTEM, "Be brief.", node(USER, "Hi\n## user\n\\## x",
        node(ASSISTANT, "Hello.\n",
             node(USER, "And?", node(ASSISTANT, "Or."), node(ASSISTANT, "Nor."))),
        node(ASSISTANT, "Yes, \U0001f98a?")))]}  # fmt: skip
STORY = {"title": "Story", "isChat": False, "model": "m", "children": [
    node(USER, "The sea",
         node(ASSISTANT, " was", node(ASSISTANT, " calm.\n\nIt"), node(ASSISTANT, " wide")),
         node(ASSISTANT, " rose"))]}  # fmt: skip


@pytest.mark.parametrize("tree", [CHAT, STORY], ids=["chat", "story"])
def test_what_is_written_is_read_again(page: Page, tree: dict[str, Any]) -> None:
    """All branches where the format holds them, and one where it does not: then that is said."""
    is_chat = tree["isChat"]
    words, losses, paths = {}, {}, []
    for name in (
        "openloom",
        "loom",
        "mikupad",
        "sillytavern",
        "sharegpt",
        "messages",
        "markdown",
        "text",
    ):
        words[name], losses[name], paths = page.evaluate(WRITTEN, [name, tree])
    texts = [[w for _, w in path] for path in paths]
    assert read(page, words["loom"])["paths"][0] == [
        [[ASSISTANT, w] for w in path] for path in texts
    ]
    for name, content in words.items():  # the command line reads what the page writes
        stored = [text for texts in read_texts(content.encode(), "a") for text in texts]
        if name == "openloom":
            joined = [t.text or "".join(m["content"] for m in t.messages or ()) for t in stored]
            assert sorted(joined) == sorted("".join(pieces) for pieces in texts)
        elif is_chat and name in ("sharegpt", "messages", "sillytavern"):
            assert [[(m["role"], m["content"]) for m in t.messages or ()] for t in stored] == [
                [(role, w) for role, w in path] for path in paths]  # fmt: skip
        elif name in ("loom", "mikupad"):
            assert stored[0].text == "".join(texts[0])
    (openloom,) = read(page, words["openloom"])["paths"]
    assert openloom == (paths if is_chat else [[[ASSISTANT, w] for w in path] for path in texts])
    (mikupad,) = read(page, words["mikupad"])["paths"]
    assert "".join(w for _, w in mikupad[0]) == "".join(texts[0])
    assert any("2 other branches are left out" in loss for loss in losses["mikupad"])
    (markdown,) = read(page, words["markdown"], "a.md")["paths"]
    if not is_chat:
        assert (
            markdown
            == [[[USER, "".join(texts[0])]]]
            == read(page, words["text"], "a.txt")["paths"][0]
        )
        return
    assert markdown == [[[role, w.rstrip("\n")] for role, w in paths[0]]]
    for name in ("sharegpt", "messages"):
        assert read(page, words[name])["paths"] == [paths]
    (tavern,) = read(page, words["sillytavern"], "a.jsonl")["paths"]
    assert tavern == paths  # every fork here is a swipe after which nothing follows
    assert "Other versions of an answer are swipes." in losses["sillytavern"]
    cut = node(USER, "Hi", node(ASSISTANT, "A"), node(ASSISTANT, "B", node(USER, "C")))
    _, said, _ = page.evaluate(WRITTEN, ["sillytavern", {**CHAT, "children": [cut]}])
    assert any(loss.startswith("1 branch is cut") for loss in said)


# -- in the dialog ----------------------------------------------------------------------------

TEXTS = """import('/page/code/share/formats.js').then(async (m) => {
    const { state, samePrompt } = await import('/page/code/state.js');
    const all = [...state.branches.values()], current = state.branches.get(state.current);
    const others = all.filter((other) => other !== current && samePrompt(other, current));
    const paths = m.pathsOf(m.treeOf([current, ...others], '%s'));
    return paths.map((path) => path.map(({role, text}) => [role, text])).sort();
})"""
CURRENT = "import('/page/code/state.js').then((m) => m.state.current)"


def share(page: Page) -> Any:
    dialog = page.get_by_role("dialog", name="Share")
    if not dialog.is_visible():
        page.get_by_role("button", name="Share", exact=True).click()
    return dialog


def load(page: Page, name: str, content: Any) -> Any:
    dialog = share(page)
    words = content if isinstance(content, str) else json.dumps(content)
    file: FilePayload = {"name": name, "mimeType": "", "buffer": words.encode()}
    with page.expect_file_chooser() as chooser:
        dialog.locator("#load-session").click()
    chooser.value.set_files(file)
    return dialog.locator(".share-news")


def clear(page: Page) -> None:
    page.keyboard.press("Escape")
    address = address_of(page)
    # Neither the tab nor the address names a text: the page would ask for it, and get 404.
    page.evaluate("() => { Storage.prototype.setItem = () => {}; sessionStorage.clear(); }")
    page.goto(f"{address}/v1/models")  # what the page still asks for would be gone
    for reply in page.request.get(f"{address}/v1/tree").json()["data"]:
        page.request.delete(f"{address}/v1/tree/{reply['id']}")
    page.goto(f"{address}/")
    expect(page.locator("#write")).to_be_enabled()


def export(page: Page, name: str, folder: Path) -> tuple[str, str]:
    dialog = share(page)
    dialog.locator("#export-format").select_option(name)
    with page.expect_download() as download:
        dialog.get_by_role("button", name="Export").click()
    file = folder / download.value.suggested_filename
    download.value.save_as(file)
    return file.name, file.read_text(encoding="utf-8")


def reply_with(page: Page, words: str) -> None:
    page.locator("#reply").fill(words)
    page.locator("#reply").press("Enter")
    finished(page)


def test_a_chat_with_branches_goes_out_and_comes_back(page: Page, tmp_path: Path) -> None:
    write(page, "Why do leaves change?", mode="chat", max_tokens=8, seed=11)
    first = page.evaluate(CURRENT)
    page.evaluate("import('/page/code/actions.js').then((m) => m.sendReply('And in spring?'))")
    finished(page)
    page.evaluate(
        """([id, at]) => import('/page/code/actions.js').then(async (m) => {
            const { promptLength, state } = await import('/page/code/state.js');
            await m.chooseToken(promptLength(state.branches.get(id)) + at, { text: ' perhaps' });
        })""",
        [first, 3],
    )
    finished(page)
    messages, pieces = page.evaluate(TEXTS % "messages"), page.evaluate(TEXTS % "pieces")
    assert sorted(len(path) for path in messages) == [2, 4]
    assert [[role for role, _ in path] for path in messages if len(path) == 4] == [
        [USER, ASSISTANT, USER, ASSISTANT]]  # fmt: skip
    files = {
        name: export(page, name, tmp_path) for name in ("openloom", "sharegpt", "messages", "loom")
    }
    for name, (file_name, content) in files.items():
        clear(page)
        news = load(page, file_name, content)
        expect(news).to_contain_text("Loaded 2 branches")
        if name == "loom":
            assert ["".join(w for _, w in path) for path in page.evaluate(TEXTS % "pieces")] == [
                "".join(w for _, w in path) for path in pieces]  # fmt: skip
        else:
            assert page.evaluate(TEXTS % "messages") == messages, name
    page.keyboard.press("Escape")
    page.locator("#go-on").click()  # it lives
    finished(page)


def test_a_tavern_chat_becomes_branches(page: Page) -> None:
    news = load(page, "Seraphina.jsonl", TAVERN)
    expect(news).to_contain_text("Loaded 3 branches (SillyTavern).")
    expect(news).to_contain_text("Left out: 1 hidden message.")
    result = page.evaluate(TEXTS % "messages")
    assert [path[-1] for path in result] == [
        [ASSISTANT, "In a forest."], [USER, "Thanks!"], [ASSISTANT, "Safe."]]  # fmt: skip
    expect(page.locator("#text")).to_contain_text("Thanks!")  # the swipe that was chosen
    current = page.evaluate(CURRENT)
    share(page)
    dropped = """(words) => {
        const data = new DataTransfer();
        data.items.add(new File([words], "story.txt"));
        const event = {dataTransfer: data, bubbles: true, cancelable: true};
        document.body.dispatchEvent(new DragEvent("drop", event));
    }"""
    page.evaluate(dropped, "The sea was calm")
    expect(page.locator(".share-news")).to_contain_text("Loaded 1 branch (Plain text).")
    assert page.evaluate(CURRENT) != current
    page.evaluate("import('/page/code/actions.js').then((m) => m.undo())")
    assert page.evaluate(CURRENT) == current


def test_what_cannot_be_loaded_leaves_nothing(page: Page, expected_errors: list[str]) -> None:
    def branches() -> int:
        return len(page.request.get(f"{address_of(page)}/v1/tree").json()["data"])

    expected_errors.append("400")
    before = branches()
    huge = [{"role": "user", "content": "word " * 200_000}]
    news = load(page, "a.json", huge)
    expect(news.get_by_role("alert")).to_contain_text("Not loaded.")
    endings = [" rose", " word" * 200_000]
    story = {"text": "The sea", "children": [{"text": item, "children": []} for item in endings]}
    expect(load(page, "b.json", story).get_by_role("alert")).to_contain_text("Not loaded.")
    for _ in range(100):  # what was created is deleted in the background
        if branches() == before:
            break
        page.wait_for_timeout(100)
    assert branches() == before
    assert page.evaluate("import('/page/code/state.js').then((m) => m.state.branches.size)") == 0
