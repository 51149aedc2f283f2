"""Edits of any span of a branch: its tokens, what stays, and scores as the model gives them."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tree_client import Tree, read

PROMPT = "Once there was"
WORDS = " a cat that sat at the mat and slept. 🐈 Then it woke up."
QUESTION = {"role": "user", "content": "Why is the sky blue?"}


@pytest.fixture
def story(tree: Tree) -> dict[str, Any]:
    return tree.do("append", tree.new(prompt=PROMPT), text=WORDS)


@pytest.fixture
def chat(tree: Tree) -> dict[str, Any]:
    """Two questions and two answers."""
    system = {"role": "system", "content": "You know the sky."}
    branch = tree.new(prompt=None, messages=[system, QUESTION], seed=3)
    branch = tree.do("resume", branch, max_tokens=6)
    branch = tree.do("append", branch, message={"role": "user", "content": "And the sea? Tell me."})
    return tree.do("resume", branch, max_tokens=5)


def edit(tree: Tree, branch: dict[str, Any], old: str, new: str, **params: Any) -> Any:
    """Replace the only tokens whose texts are `old`."""
    texts = all_texts(branch)
    spans = [
        (first, last)
        for first in range(len(texts))
        for last in range(first + 1, len(texts) + 1)
        if "".join(texts[first:last]) == old and texts[first] and texts[last - 1]
    ]
    assert spans, (old, texts)
    first, last = spans[-1]
    result = tree.ask(
        "POST", f"/{branch['id']}/edit", json={"first": first, "last": last, "text": new, **params}
    )
    return tree.get(result)


def all_texts(branch: dict[str, Any]) -> list[str]:
    return [token["text"] for token in (*branch["prompt"]["tokens"], *branch["steps"])]


def all_ids(branch: dict[str, Any]) -> list[int]:
    prompt = [token["id"] for token in branch["prompt"]["tokens"]]
    return prompt + [step["token"] for step in branch["steps"]]


def check_scores(lm: Any, branch: dict[str, Any], since: int = 0) -> None:
    expected = [p.logprob for p in lm.score(all_ids(branch)).positions][-len(branch["steps"]) :]
    received = [step["logprob"] for step in branch["steps"]]
    assert received[since:] == pytest.approx(expected[since:], abs=0.05)
    ranks = [p.rank for p in lm.score(all_ids(branch)).positions][-len(branch["steps"]) :]
    assert sum(a != b["rank"] for a, b in zip(ranks, branch["steps"], strict=True)) <= 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" mat", " warm old rug"),
        (" cat", " cats"),
        (" sat at the mat", ""),
        (" 🐈", " 👨‍👩‍👧 and 🐕"),
        (" a cat", " a\n\ncat"),
    ],
)
def test_an_edit_changes_only_the_tokens_around_it(tree, story, lm, old, new):
    edited = edit(tree, story, old, new)
    text = WORDS.replace(old, new)
    assert edited["text"] == text and edited["prompt"] == story["prompt"]
    assert (edited["parent"], edited["forked_at"]) == (story["id"], edited["forked_at"])
    assert edited["steps"][: edited["forked_at"]] == story["steps"][: edited["forked_at"]]
    assert [step["token"] for step in edited["steps"]] == lm.tokenizer.encode(text)
    assert [step["position"] for step in edited["steps"]] == list(
        range(len(edited["prompt"]["tokens"]), len(all_ids(edited)))
    )
    check_scores(lm, edited)
    assert tree.get(story) == story


def test_what_the_model_wrote_keeps_its_tokens(tree, lm):
    """Also where the tokenizer would choose others."""
    letters = [i for letter in "the cat sat" for i in lm.tokenizer.encode(letter)]
    spelled = tree.do("append", tree.new(prompt=PROMPT), tokens=letters)
    tail = tree.do("append", spelled, text=" on the mat.")
    assert [step["token"] for step in tail["steps"]][: len(letters)] == letters
    edited = edit(tree, tail, " mat", " hat")
    assert [step["token"] for step in edited["steps"]][: len(letters)] == letters
    assert edited["text"] == "the cat sat on the hat."
    first = edit(tree, tail, "s", "b")
    assert first["text"] == "the cat bat on the mat."
    assert [step["token"] for step in first["steps"]][:7] == letters[:7]


def test_the_prompt_is_edited_and_the_answer_stays(tree, story, lm):
    edited = edit(tree, story, " there", " upon a time")
    assert edited["prompt"]["text"] == "Once upon a time was"
    assert [t["id"] for t in edited["prompt"]["tokens"]] == [
        t["id"] for t in tree.new(prompt="Once upon a time was")["prompt"]["tokens"]
    ]
    assert edited["text"] == WORDS and edited["forked_at"] == 0
    check_scores(lm, edited)
    resumed = tree.do("resume", edited, max_tokens=4, temperature=0)
    expected = lm.generate(all_ids(edited), max_tokens=4, temperature=0, end=False)
    assert [s["token"] for s in resumed["steps"]][-4:] == expected.tokens
    across = tree.ask(
        "POST",
        f"/{story['id']}/edit",
        json={"first": 1, "last": len(story["prompt"]["tokens"]) + 2, "text": " more"},
    )
    assert across["prompt"]["text"] == "Once more"
    assert across["text"] == WORDS.removeprefix(" a cat")
    dropped = edit(tree, story, " there", " again", after="drop")
    assert (dropped["prompt"]["text"], dropped["text"]) == ("Once again", "")
    inside = edit(tree, story, " cat", " dog", after="drop", fork=False)
    assert (inside["id"], inside["text"]) == (story["id"], " a dog")


def test_in_a_chat_the_template_stays(tree, chat, lm):
    spoken = edit(tree, chat, " sky blue", " grass green")
    fresh = tree.new(
        prompt=None,
        messages=[
            {"role": "system", "content": "You know the sky."},
            {"role": "user", "content": "Why is the grass green?"},
        ],
    )
    assert spoken["prompt"] == fresh["prompt"]
    assert [s["token"] for s in spoken["steps"]] == [s["token"] for s in chat["steps"]]
    check_scores(lm, spoken)
    # An earlier turn, which is among the steps: the tokens of encoding the whole turn.
    (turn,) = chat["turns"]
    begin, end = turn["content"]
    assert "".join(step["text"] for step in chat["steps"][begin:end]) == "And the sea? Tell me."
    assert turn["role"] == "user" and chat["steps"][turn["start"]]["chosen"]
    later = edit(tree, chat, " sea", " seas")
    assert later["prompt"] == chat["prompt"]
    (turn,) = later["turns"]
    begin, end = turn["content"]
    ids = [step["token"] for step in later["steps"][begin:end]]
    assert ids == lm.tokenizer.encode("And the seas? Tell me.")
    model = [step["token"] for step in later["steps"] if not step["chosen"]]
    assert model == [step["token"] for step in chat["steps"] if not step["chosen"]]
    check_scores(lm, later)
    # A span over template tokens changes the words on changed sides.
    first = next(n for n, text in enumerate(all_texts(chat)) if text == " sky") + 1
    position = len(chat["prompt"]["tokens"]) + chat["turns"][0]["content"][0] + 2
    changed = tree.ask(
        "POST", f"/{chat['id']}/edit", json={"first": first, "last": position, "text": "?"}
    )
    assert changed["prompt"]["messages"][0]["content"] == "You know the sky?"
    assert changed["prompt"]["messages"][1]["content"] == ""
    assert len(changed["turns"]) == 1
    template = turn["start"] + len(chat["prompt"]["tokens"]) + 1
    tree.ask(
        "POST",
        f"/{chat['id']}/edit",
        400,
        json={"first": template, "last": template + 1, "text": "x"},
    )
    # A turn that is sent again: nothing after it stays.
    again = edit(tree, chat, " sea", " moon", after="drop")
    assert again["text"].count("moon") == 1 and len(again["steps"]) == again["turns"][0]["end"]
    first_turn = edit(tree, chat, " sky blue", " sea wet", after="drop")
    assert not first_turn["steps"] and len(first_turn["prompt"]["messages"]) == 2


def test_an_emptied_message_can_be_filled_again(tree, chat):
    (turn,) = chat["turns"]
    offset = len(chat["prompt"]["tokens"])
    body = {"first": offset + turn["content"][0], "last": offset + turn["content"][1], "text": ""}
    empty = tree.get(tree.ask("POST", f"/{chat['id']}/edit", json=body))
    (gap,) = empty["turns"]
    assert gap["content"][0] == gap["content"][1]
    at = offset + gap["content"][0]
    body = {"first": at, "last": at, "text": "And the sea? Tell me."}
    filled = tree.get(tree.ask("POST", f"/{empty['id']}/edit", json=body))
    assert all_ids(filled) == all_ids(chat)


def test_scores_come_in_parts(tree, story, lm):
    edited = edit(tree, story, " cat", " dog", score=False)
    at = edited["forked_at"]
    assert [step["logprob"] is None for step in edited["steps"]] == [
        n >= at for n in range(len(edited["steps"]))
    ]
    assert all(step["rank"] is None for step in edited["steps"][at:])
    path = f"/v1/tree/{edited['id']}/score"
    with tree.http.stream("POST", path, json={"stream": True}) as answer:
        events = [(name, data) for name, data, _ in read(answer)]
    assert events[-1] == ("done", {"scored": len(edited["steps"]) - at, "of": edited["id"]})
    assert events[0][1]["first"] == at
    after = tree.get(edited)
    check_scores(lm, after)
    assert [n for _, data in events[:-1] for n in data["logprob"]] == [
        step["logprob"] for step in after["steps"][at:]
    ]
    assert tree.ask("POST", f"/{edited['id']}/score", json={})["scored"] == 0


def test_what_cannot_be_edited_is_refused(tree, story):
    path, length = f"/{story['id']}/edit", len(all_ids(story))
    for body in (
        {"first": 4, "last": 2, "text": "x"},
        {"first": 0, "last": length + 1, "text": "x"},
        {"first": 0, "last": 1},
        {"first": 0, "last": len(story["prompt"]["tokens"]), "text": ""},
        {"first": 0, "last": 1, "text": "x", "after": "burn"},
        {"first": 0, "last": 1, "text": "x" * 2_000_000},
    ):
        tree.ask("POST", path, 400, json=body)
    tree.ask("POST", "/branch-0/edit", 404, json={"first": 0, "last": 1, "text": "x"})
    assert tree.get(story) == story
