"""Think: a search watched as a tree that grows, its texts opened and gone on with by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

import unspool
from helpers.page_actions import open_view, tokens, until
from helpers.page_colors import check_looks
from helpers.running_server import Running, running, settled
from helpers.word_model import save_chatty
from unspool.decoding.search.think import POLICIES, VERIFIER_NAMES, VerifierSpec, policy_options
from unspool.server.runtime.registry import ModelEntry

SLOW = 60_000  # milliseconds
LONG = ("think", "compose")  # policies that have no max_tokens
BEAM = {"keep": "2", "width": "2", "step": "tokens", "tokens": "6"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny model that chats, and another that could be asked to judge."""
    folder = save_chatty(tmp_path_factory.mktemp("chatty"))

    def load() -> Any:
        lm = unspool.load(folder, backend="torch", memory=16 << 20)
        lm.end_ids = frozenset()  # so that every text has its full length
        return lm

    entries = [ModelEntry("chatty", load, 1 << 20), ModelEntry("critic", load, 1 << 20)]
    with running(entries, max_think=100_000) as result:
        yield result


@pytest.fixture
def view(page: Page) -> Locator:
    return open_view(page, "Search")


def ask(view: Locator, policy: str, **fields: str) -> None:
    """Fill in the form, and begin."""
    given = {"policy": policy, "prompt": "the rows of the tree", "seed": "3", **fields}
    for name, value in given.items():
        if name == "length" and policy in LONG:  # the budget limits its texts
            continue
        field = view.locator(f"[name={name}]")
        if field.evaluate("(each) => each.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    view.locator("#run").click()


def run_search(view: Locator, policy: str = "beam", **fields: str) -> Locator:
    """A search has been made; gives its tree."""
    options = BEAM if policy == "beam" else {}
    ask(view, policy, **{"length": "24", "budget": "500", **options, **fields})
    expect(view.locator(".think-card.winner")).to_be_visible(timeout=SLOW)
    expect(view.locator("#run")).to_be_enabled(timeout=SLOW)
    return view.get_by_role("tree", name="Search tree")


def searched(server: Running, **think: Any) -> dict[str, Any]:
    """The same search, asked for by a program."""
    body = {"messages": [{"role": "user", "content": "the rows of the tree"}], "seed": 3}
    body |= {"max_tokens": 24, "temperature": 0.8, "think": {"budget": 500, **think}}
    answer = httpx.post(f"{server.url}/v1/think", json=body, timeout=60)
    answer.raise_for_status()
    result: dict[str, Any] = answer.json()
    return result


def number(view: Locator, name: str) -> Locator:
    return view.locator(f"[data-number={name}]")


def test_the_tree_is_the_servers(page: Page, view: Locator, server: Running) -> None:
    tree = run_search(view)
    reply = searched(server, policy="beam", keep=2, width=2, step="tokens", tokens=6)
    grown = [item for item in reply["data"] if item["event"] == "grown"]
    drawn_nodes = tree.get_by_role("treeitem").evaluate_all(
        "(items) => items.map(({ dataset }) => [Number(dataset.node), Number(dataset.parent)])"
    )
    assert sorted(drawn_nodes)[1:] == [[item["node"], item["parent"]] for item in grown]
    (won,) = [item for item in reply["data"] if item["event"] == "won"]
    expect(tree.locator(".winner")).to_have_attribute("data-node", str(won["node"]))
    pruned = {item["node"] for item in reply["data"] if item["event"] == "pruned"}
    marked = tree.locator("[data-pruned=true].lost")
    expect(marked).to_have_count(len(pruned))
    expect(tree.locator(".winner.lost, .on-way.lost")).to_have_count(0)
    expect(view.get_by_role("status").first).to_contain_text(f"Winner: text {won['node']}, score −")
    expect(number(view, "tokens")).to_contain_text("24, 6 in this piece")  # it is opened

    bar = view.get_by_role("meter", name="Tokens computed")
    expect(bar).to_have_attribute("aria-valuemax", "500")
    spent = int(bar.get_attribute("aria-valuenow") or 0)
    assert 24 < spent <= 500
    expect(number(view, "spent")).to_contain_text(f"{spent} of 500 tokens")
    widths = bar.locator("span").evaluate_all("(all) => all.map((one) => one.style.width)")
    assert abs(sum(float(width.rstrip("%")) for width in widths) - spent / 5) < 0.1

    check_looks(page, "think")
    assert tree.locator(".lost").count() > 2
    view.get_by_label("Hide pruned texts").check()
    expect(tree.locator(".lost")).to_have_count(0)
    expect(tree.locator(".winner")).to_be_visible()


def test_a_text_is_opened_with_its_tokens_and_its_score(page: Page, view: Locator) -> None:
    tree = run_search(view)
    tree.locator("[tabindex='0']").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    until(page, "document.activeElement.dataset.node === '1'")
    page.keyboard.press("ArrowLeft")
    until(page, "document.activeElement.dataset.node === '0'")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    card = view.get_by_role("region", name="A text of the search")
    expect(card).to_have_attribute("data-open", "1")
    score = tree.locator("[data-node='1'] .think-score").inner_text()
    expect(number(card, "score")).to_have_text(score)
    expect(card.locator(".t")).to_have_count(6)
    # The judge's score is the mean log-probability of these very tokens.
    steps = page.evaluate(
        """Promise.all([import("/page/code/state.js"), import("/page/code/think/runs.js")])
        .then(([{ state }, { thinking }]) => state.branches.get(thinking.opened.get(1).id).steps)"""
    )
    mean = sum(step["logprob"] for step in steps) / 6
    assert abs(mean - float(score.replace("−", "-"))) < 0.02
    card.locator(".t").nth(2).click()
    expect(page.get_by_role("dialog", name="Candidates for token 3")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Candidates")).to_have_count(0)

    lost = tree.locator(".lost[aria-level='2']").first  # a beginning that did not live on
    lost.click()
    expect(card.get_by_text("pruned", exact=True)).to_be_visible()
    expect(card.locator(".t")).to_have_count(6)
    words = card.locator(".t").all_text_contents()
    card.get_by_role("button", name="Open in Write").click()
    expect(tokens(page)).to_have_count(6)
    assert tokens(page).all_text_contents() == words
    expect(page.locator("#text .chosen")).to_have_count(0)  # they are the model's own
    page.locator("#one-step").click()
    expect(tokens(page)).to_have_count(7)
    open_view(page, "Search")  # the search is still there
    expect(view.locator(".think-card.winner")).to_be_visible()


def test_votes_are_counted_and_a_judge_that_fails_says_why(view: Locator) -> None:
    run_search(view, "vote", judge="vote:", pattern=".", n="5")
    votes = view.get_by_role("region", name="Votes")
    counts = votes.locator(".small").all_inner_texts()
    assert sum(int(item.split(", ")[1].split()[0]) for item in counts) == 5
    expect(number(view, "answer")).to_have_text(votes.locator(".bars > span").first.inner_text())
    run_search(view, "best-of", judge="regex:", pattern=".", n="3")
    expect(view.locator(".think-card .think-score").first).to_have_text("1")
    ask(view, "vote", judge="vote:", pattern="no such words")
    expect(view.get_by_role("alert")).to_contain_text("verifier failed", timeout=SLOW)
    expect(view.locator(".think-card.failed .think-score").first).to_have_text("failed")
    view.locator(".think-card.failed").first.click()
    expect(number(view, "why")).not_to_be_empty()


def test_stop_gives_everything_back(view: Locator, server: Running) -> None:
    ask(view, "mcts", rounds="5000", width="4", length="100", budget="100000")
    expect(view.locator(".think-card").nth(5)).to_be_visible(timeout=SLOW)
    view.locator("#run-stop").click()
    expect(view.get_by_text("Stopped")).to_be_visible()
    expect(view.locator("#run")).to_be_enabled()
    settled(server)
    view.locator(".think-card[data-node='1']").click()  # what was found can still be read
    card = view.get_by_role("region", name="A text of the search")
    expect(card.locator(".t").first).to_be_visible()


def test_what_is_wrong_is_said_in_place(
    page: Page, view: Locator, expected_errors: list[str]
) -> None:
    ask(view, "best-of", budget="much")
    expect(view.get_by_role("alert")).to_contain_text("must be an integer >= 1")
    expect(view.locator("[name=budget]")).to_have_attribute("aria-invalid", "true")
    ask(view, "best-of", budget="100", judge="regex:")
    expect(view.get_by_role("alert")).to_contain_text("needs a pattern")
    expected_errors.append("400")
    ask(view, "best-of", judge="", n="99", budget="100")
    expect(view.get_by_role("alert")).to_contain_text("at most 16")
    ask(view, "beam", judge="regex:", pattern="a", budget="500")
    expect(view.get_by_role("alert")).to_contain_text("only scores finished ones", ignore_case=True)
    # What can be chosen is what the server knows.
    choices = page.evaluate(
        "import('/page/code/think/runs.js').then(({POLICIES, JUDGES}) => ({POLICIES, JUDGES}))"
    )
    assert choices["POLICIES"].keys() == POLICIES.keys()
    for policy, reply in choices["POLICIES"].items():
        assert {item["name"] for item in reply["options"]} <= policy_options(policy).keys()
    kinds = {"pattern": "a", "model": "critic", "weigher": "certainty", None: ""}
    request = [
        VerifierSpec.parse(name + kinds[reply.get("needs")])
        for name, reply in choices["JUDGES"].items()
        if name
    ]
    assert not any(judge.runs_code for judge in request)  # no files are run on request
    supported = {
        VerifierSpec.parse(name) for name in VERIFIER_NAMES if ":" not in name and "+" not in name
    }
    assert supported <= set(request)
    view.locator("[name=judge]").select_option("ask:")
    expect(view.locator("[name=model]")).to_have_value("critic")
