"""The Read view: turns with Markdown, rendered while they grow, and safe."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from helpers.page_actions import adopt, branch, finished, post, tokens, until

ANSWER = """# Title

Some **bold** and `code`, a [link](https://example.org), a [bad](javascript:alert(1)) one,
<img src=x onerror="document.title='bad'"> and ![a picture](https://example.org/a.png).

- one
- two

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x):
    return x
```

العائلة 👨‍👩‍👧"""


@pytest.fixture
def chat(page: Page) -> Page:
    created = post(page, "", messages=[{"role": "user", "content": "Show it."}], max_tokens=5)["id"]
    post(page, f"/{created}/append", text=ANSWER)
    post(page, f"/{created}/append", message={"role": "user", "content": "More of it?"})
    adopt(page, [created], created)
    page.locator("#read").click()
    expect(page.locator(".turn")).to_have_count(3)
    return page


def test_markdown_is_rendered_and_nothing_in_it_is_html(chat: Page) -> None:
    requests: list[str] = []
    chat.on("request", lambda request: requests.append(request.url))
    answer = chat.locator(".turn-assistant .md")
    expect(answer.locator("h3")).to_have_text("Title")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("li")).to_have_count(2)
    expect(answer.locator("td")).to_have_count(2)
    expect(answer.locator("pre .code-keyword")).to_have_text(["def", "return"])
    links = answer.locator("a").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert links == ["https://example.org", "https://example.org/a.png"]
    expect(answer.locator("img, script, iframe")).to_have_count(0)
    expect(answer).to_contain_text("<img src=x onerror=")
    assert chat.title() != "bad" and not [url for url in requests if "example.org" in url]
    answer.get_by_role("button", name="Copy the code").click()
    assert answer.locator("p").last.get_attribute("dir") == "auto"
    assert "👨‍👩‍👧" in (answer.text_content() or "")


ARABIC = "السلام عليكم، كيف حالك؟"
FAMILY = "👨‍👩‍👧"


def test_scripts_from_right_to_left_and_families_of_emoji(page: Page) -> None:
    created = post(page, "", messages=[{"role": "user", "content": ARABIC}], seed=1)["id"]
    post(page, f"/{created}/append", text=f"{ARABIC}\nA family: {FAMILY}.")
    adopt(page, [created], created)
    expect(tokens(page).first).to_be_visible()
    # Each line of tokens has its own direction; a letter of several tokens is joined to the others.
    starts = page.evaluate(
        """() => [...document.querySelectorAll("#text .line")].map((line) => {
            const box = line.parentElement.getBoundingClientRect();
            const first = line.querySelector(".t:not(.part)").getBoundingClientRect();
            return first.left - box.left < box.right - first.right ? "left" : "right";
        })"""
    )
    assert starts[-2:] == ["right", "left"] and starts.count("right") == 2
    line = page.locator("#text .line").nth(len(starts) - 2)
    assert "·" not in line.inner_text()
    expect(page.locator("#text .t", has_text=FAMILY)).to_have_count(1)
    page.locator("#read").click()
    turns = page.locator("#text .md")
    expect(turns.first).to_have_text(ARABIC)
    expect(turns.last).to_contain_text(FAMILY)
    directions = turns.locator("p").evaluate_all(
        "(all) => all.map((p) => getComputedStyle(p).direction)"
    )
    assert set(directions) == {"rtl"}


def test_blocks_that_do_not_change_stay(chat: Page) -> None:
    kept = chat.evaluate(
        """async () => {
            const { renderMarkdown } = await import("/page/code/write/markdown.js");
            const box = document.createElement("div");
            const text = "# One\\n\\nTwo **three** four.\\n\\n```js\\nlet x = 1;\\n```\\n\\nFive";
            const kept = [];
            let first = null;
            for (let end = 1; end <= text.length; end += 1) {
                renderMarkdown(box, text.slice(0, end));
                if (end === 20) first = box.firstElementChild;
                if (end > 20) kept.push(box.firstElementChild === first);
            }
            const again = document.createElement("div");
            renderMarkdown(again, text);
            return [kept.every(Boolean), box.innerHTML === again.innerHTML, box.children.length];
        }"""
    )
    assert kept == [True, True, 4]


def test_the_selection_goes_along(chat: Page) -> None:
    chat.evaluate(
        """() => {
            const words = document.querySelector(".turn-assistant strong").firstChild;
            document.getSelection().setBaseAndExtent(words, 0, words, 4);
        }"""
    )
    chat.locator("#tokens").click()
    expect(chat.locator("#text .t.selected")).to_have_text("bold")
    chat.locator("#read").click()
    until(chat, "document.getSelection().toString() === 'bold'")


def test_a_turn_is_changed_sent_again_and_regenerated(chat: Page) -> None:
    first = branch(chat)
    question = chat.locator(".turn-user").first
    question.get_by_role("button", name="Edit").click()
    question.locator("textarea").fill("Show it again.")
    question.get_by_role("button", name="Only change").click()
    expect(question.locator(".md")).to_have_text("Show it again.")
    changed = branch(chat)
    assert changed["parent"] == first["id"] and len(changed["steps"]) == len(first["steps"])
    again = chat.locator(".turn-user").last
    again.get_by_role("button", name="Edit").click()
    again.locator("textarea").fill("Less of it?")
    again.get_by_role("button", name="Send again").click()
    expect(again.locator(".md")).to_have_text("Less of it?")
    finished_reading(chat)
    resent = branch(chat)
    (turn,) = resent["turns"]
    assert len(resent["steps"]) > turn["end"]
    chat.locator(".turn-assistant").last.get_by_role("button", name="Regenerate").click()
    until(chat, f"document.querySelector('#text').dataset.branch !== {resent['id']!r}")
    finished_reading(chat)
    regenerated = branch(chat)
    assert regenerated["parent"] == resent["id"] and regenerated["forked_at"] == turn["end"]
    chat.locator("#text").press("Control+z")
    expect(chat.locator("#text")).to_have_attribute("data-branch", resent["id"])


def finished_reading(page: Page) -> None:
    until(page, "import('/page/code/state.js').then((m) => m.state.writing === null)")
    expect(page.locator("#text")).to_have_attribute("aria-busy", "false")


def test_an_answer_is_rendered_while_it_grows(page: Page) -> None:
    page.locator("#prompt").fill("Tell me a story.")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#read")).to_be_visible()
    page.locator("#read").click()
    finished_reading(page)
    written = branch(page)["text"].split()
    displayed = page.locator(".turn-assistant .md").text_content() or ""
    assert written and all(word.strip("*_#`.-") in displayed for word in written[:3])
    page.locator("#tokens").click()
    finished(page)
