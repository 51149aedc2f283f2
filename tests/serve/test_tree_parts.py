"""Parts of a branch written anew, doubt and revision: scores as the model gives them elsewhere."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from running_server import settled
from tree_client import Tree, read

from unspool.decoding.edit.doubt import causal_surprise

PROMPT = "Once there was"
WORDS = " a cat that sat at the mat and slept. 🐈 Then it woke up."


@pytest.fixture(scope="module")
def tree(server: Any) -> Tree:
    return Tree(server.url)


@pytest.fixture
def story(tree: Tree) -> dict[str, Any]:
    return tree.do("append", tree.new(prompt=PROMPT), text=WORDS)


def span(branch: dict[str, Any], words: str) -> tuple[int, int]:
    """The steps of these words."""
    pieces = [step["piece"] for step in branch["steps"]]
    for first in range(len(pieces)):
        for last in range(first + 1, len(pieces) + 1):
            if "".join(pieces[first:last]) == words:
                return first, last
    raise AssertionError(f"{words!r} is not in {pieces}")


def test_candidates_are_ranked_by_the_whole_text(
    tree: Tree, story: dict[str, Any], lm: Any
) -> None:
    first, last = span(story, " sat")
    asked = {"first": first, "last": last, "candidates": 4}
    found = tree.ask("POST", f"/{story['id']}/fill", json=asked)
    told = found["candidates"]
    assert found["old"] == "sat" and [one["new"] for one in told if one["now"]] == ["sat"]
    scores = [one["score"] for one in told]
    assert scores == sorted(scores, reverse=True) and len({one["new"] for one in told}) == len(told)
    assert sum(one["probability"] for one in told) == pytest.approx(1)
    start = [lm.tokenizer.special_tokens["<|endoftext|>"]]
    texts = [PROMPT + WORDS.replace(" sat", f" {one['new']}") for one in told]
    totals = [lm.score([*start, *lm.tokenizer.encode(text)]).total for text in texts]
    assert [s - scores[0] for s in scores] == pytest.approx(
        [t - totals[0] for t in totals], abs=0.5
    )
    for one in told:
        change = {name: one[name] for name in ("first", "last", "text")}
        made = tree.do("replace", story, changes=[change])
        assert made["text"] == WORDS.replace(" sat", f" {one['new']}")
    assert tree.get(story) == story


def test_a_replaced_part_leaves_the_rest_which_is_judged_anew(
    tree: Tree, story: dict[str, Any], lm: Any
) -> None:
    first, last = span(story, " mat")
    at = span(story, " woke")[0]
    changes = [
        {"first": at, "last": at + 1, "text": " got"},
        {"first": first, "last": last, "text": " warm old rug"},
    ]
    made = tree.do("replace", story, changes=changes)
    assert made["text"] == WORDS.replace(" mat", " warm old rug").replace("woke", "got")
    assert (made["parent"], made["forked_at"]) == (story["id"], first)
    assert made["steps"][:first] == story["steps"][:first]
    tokens = [*(t["id"] for t in made["prompt"]["tokens"]), *(s["token"] for s in made["steps"])]
    own = [p.logprob for p in lm.score(tokens).positions][-len(made["steps"]) :]
    got = [step["logprob"] for step in made["steps"]]
    assert got[first:] == pytest.approx(own[first:], abs=0.05)
    inside = tree.do("replace", made, changes=changes[1:], fork=False)
    assert inside["id"] == made["id"]


def test_a_character_of_several_tokens_is_replaced_whole(tree: Tree, story: dict[str, Any]) -> None:
    pieces = [step["text"] for step in story["steps"]]
    cat = next(n for n, piece in enumerate(pieces) if "🐈" in piece)
    found = tree.ask("POST", f"/{story['id']}/fill", json={"first": cat, "last": cat + 1})
    one = found["candidates"][0]
    assert one["first"] <= cat < one["last"] and found["old"].endswith("🐈")
    change = {**{name: one[name] for name in ("first", "last")}, "text": " (cat)"}
    assert tree.do("replace", story, changes=[change])["text"] == WORDS.replace("🐈", "(cat)")


def test_doubt_is_the_models_own_surprise(tree: Tree, story: dict[str, Any], lm: Any) -> None:
    tokens = [*(t["id"] for t in story["prompt"]["tokens"]), *(s["token"] for s in story["steps"])]
    expected = causal_surprise(lm.score(tokens), len(tokens))[-len(story["steps"]) :].clip(0)
    found = tree.ask("POST", f"/{story['id']}/doubt", json={})["doubts"]
    assert found == pytest.approx(list(expected), abs=0.1)
    empty = tree.new(prompt=PROMPT)
    assert tree.ask("POST", f"/{empty['id']}/doubt", json={})["doubts"] == []


def test_proposals_come_one_by_one_or_together(tree: Tree, story: dict[str, Any]) -> None:
    whole = tree.ask("POST", f"/{story['id']}/revise", json={"places": 2})
    assert whole["looked"] == 2
    body = {"places": 2, "stream": True}
    with tree.http.stream("POST", f"/v1/tree/{story['id']}/revise", json=body) as answer:
        events = list(read(answer))
    assert events[-1][0] == "done" and events[-1][1]["looked"] == 2
    streamed = [data for name, data, _ in events if name == "proposal"]
    assert [one["new"] for one in streamed] == [one["new"] for one in whole["data"]]
    for one in whole["data"]:
        assert one["old"] in WORDS and one["new"] != one["old"] and one["gain"] > 0
        change = {name: one[name] for name in ("first", "last", "text")}
        assert one["new"] in tree.do("replace", story, changes=[change])["text"]


def test_who_leaves_a_revision_ends_it(tree: Tree, story: dict[str, Any], server: Any) -> None:
    body = {"places": 200, "stream": True}
    path = f"{server.url}/v1/tree/{story['id']}/revise"
    with httpx.stream("POST", path, json=body, timeout=60) as answer:
        next(answer.iter_lines())
    settled(server)


@pytest.mark.parametrize(
    ("verb", "body", "said"),
    [
        ("fill", {"first": 3, "last": 3}, "last must be after first"),
        ("fill", {"first": 0, "last": 999}, "steps"),
        ("fill", {"first": 0, "last": 1, "candidates": 999}, "candidates"),
        ("replace", {"changes": []}, "changes"),
        ("replace", {"changes": [{"first": 2, "last": 1, "text": "a"}]}, "must be after first"),
        ("replace", {"changes": [{"first": 0, "last": 3, "text": "a"},
                                 {"first": 2, "last": 4, "text": "b"}]}, "overlap"),
        ("doubt", {"by": "masked"}, "masked model"),
        ("doubt", {"twin": "smollm"}, "no mask token"),
        ("revise", {"places": 0}, "places"),
        ("revise", {"threshold": 1}, "threshold"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(
    tree: Tree, story: dict[str, Any], verb: str, body: dict[str, Any], said: str
) -> None:
    error = tree.ask("POST", f"/{story['id']}/{verb}", 400, json=body)["error"]
    assert said in error["message"]


def test_nothing_to_revise(tree: Tree) -> None:
    empty = tree.new(prompt=PROMPT)
    tree.ask("POST", f"/{empty['id']}/revise", 400, json={})
    tree.ask("POST", "/branch-nobody/revise", 404, json={})
