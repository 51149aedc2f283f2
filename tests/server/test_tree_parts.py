"""Parts of a branch written anew, doubt and revision: scores as the model gives them elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tree_client import Tree, read
from unspool.decoding.edit.edit import causal_surprise

PROMPT = "Once there was"
WORDS = " a cat that sat at the mat and slept. 🐈 Then it woke up."


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


def test_candidates_are_ranked_by_the_whole_text(tree, story, lm):
    first, last = span(story, " sat")
    body = {"first": first, "last": last, "candidates": 4}
    result = tree.ask("POST", f"/{story['id']}/fill", json=body)
    reply = result["candidates"]
    assert result["old"] == "sat" and [item["new"] for item in reply if item["now"]] == ["sat"]
    scores = [item["score"] for item in reply]
    assert scores == sorted(scores, reverse=True) and len({item["new"] for item in reply}) == len(
        reply
    )
    assert sum(item["probability"] for item in reply) == pytest.approx(1)
    start = [lm.tokenizer.special_tokens["<|endoftext|>"]]
    texts = [PROMPT + WORDS.replace(" sat", f" {item['new']}") for item in reply]
    totals = [lm.score([*start, *lm.tokenizer.encode(text)]).total for text in texts]
    assert [s - scores[0] for s in scores] == pytest.approx(
        [t - totals[0] for t in totals], abs=0.5
    )
    for item in reply:
        change = {name: item[name] for name in ("first", "last", "text")}
        created = tree.do("replace", story, changes=[change])
        assert created["text"] == WORDS.replace(" sat", f" {item['new']}")
    assert tree.get(story) == story


def test_a_replaced_part_leaves_the_rest_which_is_judged_anew(tree, story, lm):
    first, last = span(story, " mat")
    at = span(story, " woke")[0]
    changes = [
        {"first": at, "last": at + 1, "text": " got"},
        {"first": first, "last": last, "text": " warm old rug"},
    ]
    created = tree.do("replace", story, changes=changes)
    assert created["text"] == WORDS.replace(" mat", " warm old rug").replace("woke", "got")
    assert (created["parent"], created["forked_at"]) == (story["id"], first)
    assert created["steps"][:first] == story["steps"][:first]
    tokens = [
        *(t["id"] for t in created["prompt"]["tokens"]),
        *(s["token"] for s in created["steps"]),
    ]
    local = [p.logprob for p in lm.score(tokens).positions][-len(created["steps"]) :]
    received = [step["logprob"] for step in created["steps"]]
    assert received[first:] == pytest.approx(local[first:], abs=0.05)
    inside = tree.do("replace", created, changes=changes[1:], fork=False)
    assert inside["id"] == created["id"]


def test_a_character_of_several_tokens_is_replaced_whole(tree: Tree, story: dict[str, Any]) -> None:
    pieces = [step["text"] for step in story["steps"]]
    cat = next(n for n, piece in enumerate(pieces) if "🐈" in piece)
    result = tree.ask("POST", f"/{story['id']}/fill", json={"first": cat, "last": cat + 1})
    item = result["candidates"][0]
    assert item["first"] <= cat < item["last"] and result["old"].endswith("🐈")
    change = {**{name: item[name] for name in ("first", "last")}, "text": " (cat)"}
    assert tree.do("replace", story, changes=[change])["text"] == WORDS.replace("🐈", "(cat)")


def test_doubt_is_the_models_own_surprise(tree: Tree, story: dict[str, Any], lm: Any) -> None:
    tokens = [*(t["id"] for t in story["prompt"]["tokens"]), *(s["token"] for s in story["steps"])]
    expected = causal_surprise(lm.score(tokens), len(tokens))[-len(story["steps"]) :].clip(0)
    result = tree.ask("POST", f"/{story['id']}/doubt", json={})["doubts"]
    assert result == pytest.approx(list(expected), abs=0.1)
    empty = tree.new(prompt=PROMPT)
    assert tree.ask("POST", f"/{empty['id']}/doubt", json={})["doubts"] == []


def test_proposals_come_one_by_one_or_together(tree: Tree, story: dict[str, Any]) -> None:
    complete = tree.ask("POST", f"/{story['id']}/revise", json={"places": 2})
    assert complete["looked"] == 2
    body = {"places": 2, "stream": True}
    with tree.http.stream("POST", f"/v1/tree/{story['id']}/revise", json=body) as answer:
        events = list(read(answer))
    assert events[-1][0] == "done" and events[-1][1]["looked"] == 2
    streamed = [data for name, data, _ in events if name == "proposal"]
    assert [item["new"] for item in streamed] == [item["new"] for item in complete["data"]]
    for item in complete["data"]:
        assert item["old"] in WORDS and item["new"] != item["old"] and item["gain"] > 0
        change = {name: item[name] for name in ("first", "last", "text")}
        assert item["new"] in tree.do("replace", story, changes=[change])["text"]


@pytest.mark.parametrize(
    ("verb", "body", "message"),
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
def test_what_cannot_be_is_said(tree, story, verb, body, message):
    error = tree.ask("POST", f"/{story['id']}/{verb}", 400, json=body)["error"]
    assert message in error["message"]


def test_nothing_to_revise(tree: Tree) -> None:
    empty = tree.new(prompt=PROMPT)
    tree.ask("POST", f"/{empty['id']}/revise", 400, json={})
    tree.ask("POST", "/branch-nobody/revise", 404, json={})


def test_words_of_a_prompt_are_proposed_and_gaps_filled(tree: Tree) -> None:
    messages = [{"role": "user", "content": "Is the ___ on the mat?"}]
    chat = tree.do("append", tree.new(prompt=None, messages=messages), text="The cat sat there.")
    pieces = [token["piece"] for token in chat["prompt"]["tokens"]]
    at = next(n for n, piece in enumerate(pieces) if piece.endswith("mat"))
    body = {"first": at, "last": at + 1, "candidates": 2, "whole_text": True}
    result = tree.ask("POST", f"/{chat['id']}/fill", json=body)
    assert result["old"] == "mat" and {item["first"] for item in result["candidates"]} == {at}
    best = next(item for item in result["candidates"] if not item["now"])
    change = {name: best[name] for name in ("first", "last", "text")}
    edited = tree.get(tree.ask("POST", f"/{chat['id']}/edit", json=change))
    content = f"Is the ___ on the {best['new']}?"
    assert edited["prompt"]["messages"][0]["content"] == content
    assert edited["text"] == chat["text"]
    gap = next(n for n, piece in enumerate(pieces) if "___" in piece)
    last = pieces.index(" on")
    result = tree.ask("POST", f"/{chat['id']}/fill", json={**body, "first": gap, "last": last})
    assert result["old"] == "___" and not any("_" in item["new"] for item in result["candidates"])
    answer = tree.http.post(f"/v1/tree/{chat['id']}/fill", json={**body, "last": len(pieces) + 1})
    assert answer.status_code == 400 and "words of one message" in answer.text
