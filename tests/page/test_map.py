"""The map of the tree: jumping, naming, deleting and undoing, and two branches side by side."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from helpers import page_actions as acts
from helpers.page_actions import (
    address_of,
    branch,
    finished,
    open_panel,
    post,
    text,
    tokens,
    write,
)

PROMPT = "The capital of Germany is"


def choose(page: Page, step: int, words: str) -> dict[str, Any]:
    """Other words at a step; gives the branch that they began."""
    page.evaluate(
        """async ([step, text]) => {
            const { chooseToken } = await import("/page/code/actions.js");
            const { currentBranch, promptLength } = await import("/page/code/state.js");
            await chooseToken(promptLength(currentBranch()) + step, { text });
        }""",
        [step, words],
    )
    finished(page)
    return branch(page)


def items(page: Page) -> Locator:
    return page.get_by_role("treeitem")


def item(page: Page, identity: str) -> Locator:
    return page.locator(f'.map-item[data-branch="{identity}"]')


def get(page: Page, identity: str) -> dict[str, Any]:
    result: dict[str, Any] = page.request.get(f"{address_of(page)}/v1/tree/{identity}").json()
    return result


def adopt(page: Page, ids: list[str], current: str) -> None:
    """Show branches that were made elsewhere as this page's own, on the map."""
    acts.adopt(page, ids, current)
    open_panel(page, "Branches")
    expect(items(page)).to_have_count(len(ids))


def three(page: Page) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A text, other words at its step 4, and other words at step 7 of that, which is shown."""
    created = [post(page, "", prompt=PROMPT, seed=1, temperature=0)["id"]]
    post(page, f"/{created[0]}/resume", max_tokens=12)
    for step, words in ((4, " not Bonn, and"), (7, " never Paris")):
        created.append(post(page, f"/{created[-1]}/choose", at=step, text=words)["id"])
        post(page, f"/{created[-1]}/resume", max_tokens=8)
    adopt(page, created, created[-1])
    root, bonn, paris = (get(page, identity) for identity in created)
    return root, bonn, paris


def test_branches_leave_the_line_that_holds_their_first_tokens(page: Page) -> None:
    write(page, PROMPT, max_tokens=12, seed=1, temperature=0)
    root = branch(page)
    bonn = choose(page, 4, " not Bonn, and")
    paris = choose(page, 7, " never Paris")
    open_panel(page, "Branches")
    expect(items(page)).to_have_count(3)
    for child, parent, start in ((bonn, root, 4), (paris, bonn, 7)):
        assert (child["parent"], child["forked_at"]) == (parent["id"], start)
        child_item = item(page, child["id"])
        expect(child_item).to_have_attribute("data-from", parent["id"])
        expect(child_item).to_have_attribute("data-start", str(start))
        above, below = item(page, parent["id"]).bounding_box(), child_item.bounding_box()
        assert above and below
        assert above["y"] + above["height"] <= below["y"] + 1 and above["x"] < below["x"]
    expect(item(page, paris["id"])).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("tree")).to_have_accessible_name(f"Prompt {PROMPT}")

    # Step 2 of this text is the first one's, and behind step 0 nothing is shared but the prompt.
    early = choose(page, 2, " Rome")
    expect(item(page, early["id"])).to_have_attribute("data-from", root["id"])
    first = choose(page, 0, " Oslo")
    expect(item(page, first["id"])).to_have_attribute("data-from", "")
    name = re.compile(r"Oslo.*shares only the prompt")
    expect(item(page, first["id"])).to_have_accessible_name(name)


def test_jump_by_click_and_by_keys(page: Page) -> None:
    root, bonn, paris = three(page)
    item(page, root["id"]).click()
    expect(item(page, root["id"])).to_have_attribute("aria-selected", "true")
    expect(tokens(page)).to_have_count(root["length"])
    assert text(page) == root["text"]

    item(page, root["id"]).press("ArrowRight")
    expect(item(page, bonn["id"])).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(item(page, paris["id"])).to_be_focused()
    page.keyboard.press("ArrowLeft")
    expect(item(page, bonn["id"])).to_be_focused()
    page.keyboard.press("Enter")
    expect(item(page, bonn["id"])).to_have_attribute("aria-selected", "true")
    expect(tokens(page)).to_have_count(bonn["length"])
    assert branch(page)["id"] == bonn["id"]

    item(page, bonn["id"]).hover()
    hint = page.locator(".map-hint")
    expect(hint).to_contain_text("not Bonn, and")
    expect(hint).to_contain_text(f"{bonn['length']} tokens, shares 4 tokens with")
    page.mouse.move(5, 5)
    expect(hint).to_have_count(0)


def test_name_delete_and_undo(page: Page) -> None:
    root, bonn, paris = three(page)
    panel = page.locator("#side-panel")
    panel.get_by_role("button", name="Name", exact=True).click()
    field = panel.get_by_label("Name of the branch")
    field.fill("away")
    field.press("Escape")
    expect(field).to_have_count(0)
    assert branch(page)["name"] is None

    item(page, paris["id"]).press("F2")
    field.fill("The one with Paris")
    field.press("Enter")
    expect(item(page, paris["id"])).to_have_text("The one with Paris")
    expect(item(page, paris["id"])).to_be_focused()
    assert branch(page)["name"] == "The one with Paris"

    page.get_by_role("button", name="Undo: rename to “The one with Paris”").click()
    expect(item(page, paris["id"])).to_contain_text("never Paris")
    page.get_by_role("button", name="Redo: rename to “The one with Paris”").click()
    expect(item(page, paris["id"])).to_have_text("The one with Paris")

    item(page, bonn["id"]).click()
    expect(item(page, bonn["id"])).to_have_attribute("aria-selected", "true")
    panel.get_by_role("button", name="Delete").click()
    said = panel.get_by_role("status").filter(has_text="Deleted “not Bonn")
    expect(said).to_be_visible()
    expect(items(page)).to_have_count(2)
    expect(item(page, paris["id"])).to_have_attribute("data-from", root["id"])
    expect(item(page, paris["id"])).to_have_attribute("data-start", "4")

    said.get_by_role("button", name="Undo").click()
    expect(items(page)).to_have_count(3)
    expect(said).to_have_count(0)
    expect(item(page, paris["id"])).to_have_attribute("data-from", bonn["id"])
    expect(item(page, bonn["id"])).to_be_focused()


def test_side_by_side(page: Page) -> None:
    root, _, paris = three(page)
    panel = page.locator("#side-panel")
    panel.get_by_label("Compare with").select_option(root["id"])
    beside = page.get_by_role("region", name="Two branches side by side")
    expect(beside).to_be_visible()

    pair = zip(root["steps"], paris["steps"], strict=False)
    shared = len(list(itertools.takewhile(lambda two: two[0]["token"] == two[1]["token"], pair)))
    assert shared == 4
    expect(beside).to_contain_text("The prompt and the first 4 tokens are the same")
    expect(beside.locator(".beside-shared .t")).to_have_count(shared)
    for reply in (root, paris):
        column = beside.locator(f'.beside-column[data-branch="{reply["id"]}"]')
        expect(column.locator(".t")).to_have_count(reply["length"] - shared)
        expect(column.locator(".t").first).to_contain_class("parts")
        expect(column.locator(".t").nth(1)).to_have_text(reply["steps"][shared + 1]["text"])

    rows = {
        row.locator("th").inner_text(): row.locator("td").all_inner_texts()
        for row in beside.locator("tbody tr").all()
    }
    assert rows["Tokens"] == [str(paris["length"]), str(root["length"])]
    for place, reply in enumerate((paris, root)):
        total = sum(step["logprob"] for step in reply["steps"])
        assert f"{total:.2f} nats".replace("-", "−") in rows["Probability of the whole text"][place]
        perplexity = math.exp(-total / reply["length"])
        assert float(rows["Perplexity"][place]) == pytest.approx(perplexity, abs=0.006)
    expect(beside).to_contain_text("Both have the same settings.")

    page.keyboard.press("Escape")
    expect(beside).to_have_count(0)
    expect(tokens(page)).to_have_count(paris["length"])


def test_settings_that_differ_are_said(page: Page) -> None:
    write(page, PROMPT, max_tokens=4, seed=1, temperature=0)
    first = branch(page)
    write(page, "Once upon a time", max_tokens=4, seed=2, temperature=1.5)
    current = branch(page)["id"]
    adopt(page, [first["id"], current], current)  # the first is of another session
    open_panel(page, "Branches")
    expect(page.get_by_role("tree")).to_have_count(2)
    item(page, branch(page)["id"]).focus()
    page.keyboard.press("ArrowDown")
    expect(item(page, first["id"])).to_be_focused()
    page.keyboard.press("c")
    beside = page.get_by_role("region", name="Two branches side by side")
    expect(beside).to_contain_text("The prompts differ.")
    expect(beside.locator('[data-setting="temperature"] td')).to_have_text(["1.5", "0"])
    expect(beside.locator('[data-setting="seed"] td')).to_have_text(["2", "1"])
    beside.get_by_role("button", name="Close").click()
    expect(beside).to_have_count(0)


def test_grows_while_it_is_written(page: Page) -> None:
    write(page, PROMPT, max_tokens=3, seed=1)
    open_panel(page, "Branches")
    page.evaluate(
        """async () => {
            const { resumeWriting, setSpeed } = await import("/page/code/actions.js");
            await setSpeed(20);
            resumeWriting({ n: 400 });
        }"""
    )
    growing = page.locator(".map-lines .end.growing")
    expect(growing).to_have_count(1)
    before = float(growing.get_attribute("cx") or 0)
    moved = "before => document.querySelector('.map-lines .end').getAttribute('cx') > before + 10"
    page.wait_for_function(moved, arg=before)
    page.locator("#pause").click()
    expect(growing).to_have_count(0)


# -- thirty --------------------------------------------------------------------------------------

# Long, short, blank, wide, from right to left: a branch may begin with anything.
WORDS = (
    " because the days grow short and the trees take back what they can use", ",", "\n\n", "   ",
    " 你好，世界！叶子为什么在秋天变色？因为白天变短了", " W" * 30, "i" * 40,
    " مرحبا بالعالم، لماذا تتغير ألوان الأوراق", " 👩‍👩‍👧 🍁 🍁 🍁", "\t", "\u200b\u200b", " a",
)  # fmt: skip


def thirty(page: Page) -> list[str]:
    """Branches as a person might leave them in an hour: forks of forks, some of them named."""
    first = post(page, "", prompt="Leaves change color in fall because", seed=3)["id"]
    created = [post(page, f"/{first}/append", text=WORDS[0] * 3)]
    for number in range(1, 30):
        parent = created[(number * 7) % len(created) if number % 3 else 0]
        at = (number * 11) % (parent["length"] + 1)
        name = f"idea {number}" if number % 9 == 0 else None
        fork = post(page, f"/{parent['id']}/fork", at=at, name=name)["id"]
        created.append(post(page, f"/{fork}/append", text=WORDS[number % len(WORDS)]))
    return [item["id"] for item in created]


def labels(page: Page) -> list[dict[str, Any]]:
    """The boxes of what is written at the branches."""
    result: list[dict[str, Any]] = page.evaluate(
        """() => [...document.querySelectorAll(".map-item")].map((item) => {
            const words = document.createRange();
            words.selectNodeContents(item.firstElementChild);
            const box = item.firstElementChild.getBoundingClientRect();
            const whole = words.getBoundingClientRect();
            const right = Math.min(box.right, whole.right);
            const { branch: id, from } = item.dataset;
            const wide = whole.width;
            return { id, from, left: box.left, right, top: box.top, bottom: box.bottom, wide };
        })"""
    )
    return result


def test_thirty_branches_without_overlaps(page: Page) -> None:
    created = thirty(page)
    adopt(page, created, created[20])
    for width, height in ((1280, 800), (360, 740)):
        page.set_viewport_size({"width": width, "height": height})
        drawn_anew = "[...document.querySelectorAll('.map-item')].every((item) => "
        drawn_anew += "item.getBoundingClientRect().right <= innerWidth)"
        acts.until(page, drawn_anew)
        assert_apart(page, width)
    page.set_viewport_size({"width": 1280, "height": 800})
    page.get_by_role("button", name="Enlarge").click()
    expect(page.get_by_role("dialog", name="Map of all branches")).to_be_visible()
    assert_apart(page, 1280)
    page.keyboard.press("Escape")

    find = page.get_by_label("Search branches by name or text")
    whence = item(page, created[27]).get_attribute("data-from")
    find.fill("IDEA 27")
    expect(page.locator(".map-item:not(.passed)")).to_have_count(1)
    expect(item(page, created[27])).to_have_attribute("data-from", whence or "")
    expect(page.locator("#side-panel")).to_contain_text("1 branch found")
    find.fill("")
    expect(items(page)).to_have_count(30)


def assert_apart(page: Page, width: int) -> None:
    boxes = labels(page)
    assert len(boxes) == 30
    tops = {box["id"]: box["top"] for box in boxes}
    for box in boxes:
        # A label is seen: all of it if it is short, and some of it in any case.
        assert box["right"] <= width and box["wide"] > 0, box
        assert box["right"] - box["left"] >= min(20, box["wide"] - 1), box
        if box["from"]:
            assert tops[box["from"]] < box["top"]
    for item, other in itertools.combinations(boxes, 2):
        across = item["left"] < other["right"] and other["left"] < item["right"]
        down = item["top"] < other["bottom"] - 0.5 and other["top"] < item["bottom"] - 0.5
        assert not (across and down), (item, other)


def test_layout_of_many_random_trees(page: Page) -> None:
    """Lines and labels in one lane never meet, and a line down crosses neither."""
    faults = page.evaluate(
        """async () => {
            const { assignLanes, scale, trees } = await import("/page/code/map/drawing.js");
            let seed = 1;
            const below = (n) => {
                seed = (seed * 1103515245 + 12345) % 2147483648;
                return Math.floor((seed / 2147483648) * n);
            };
            const faults = [];
            const [label, shortest] = [90, 10];
            for (let round = 0; round < 60; round += 1) {
                const branches = [];
                for (let number = 0; number < 50; number += 1) {
                    const parent = number && below(20) ? branches[below(number)] : null;
                    const at = parent ? below(parent.length + 1) : null;
                    branches.push({
                        id: `b${number}`, parent: parent?.id ?? null, forked_at: at,
                        length: (at ?? 0) + below(round % 3 ? 40 : 600), created: number,
                        group: parent?.group ?? below(3), writing: !below(50),
                    });
                }
                const width = [300, 500, 1200][round % 3];
                const x = scale(Math.max(...branches.map((branch) => branch.length)), width - 130);
                let drawn = 0;
                for (const { items } of trees(branches)) {
                    assignLanes(items, { x, width, shortest, gap: 12, labelWidth: () => label });
                    drawn += items.length;
                    const lanes = new Map(items.map((item) => [item.id, item.lane]));
                    const end = (item) => Math.max(item.x1, item.x0 + label);
                    for (const one of items) {
                        const above = lanes.get(one.from) ?? 0;
                        if (above >= one.lane) faults.push([round, "parent not above", one.id]);
                        if (one.room < label) faults.push([round, "no room", one.id, one.room]);
                        for (const other of items) {
                            if (one === other) continue;
                            const meet = one.x0 < end(other) && other.x0 < end(one);
                            if (one.lane === other.lane && meet) {
                                faults.push([round, "share a place", one.id, other.id]);
                            }
                            const isBetween = other.lane > above && other.lane < one.lane;
                            if (isBetween && one.x0 > other.x0 && one.x0 < end(other)) {
                                faults.push([round, "crosses", one.id, other.id]);
                            }
                        }
                    }
                }
                if (drawn !== 50) faults.push([round, "lost some", drawn]);
            }
            return faults;
        }"""
    )
    assert faults == []
