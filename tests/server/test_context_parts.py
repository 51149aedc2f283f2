"""Memory, author's note and lorebook of a branch: what the model reads, and where it stands."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tree_client import Tree

STORY = "One morning\nthe cat sat.\nA dog came\nand barked"
MEMORY = "Anna is a pilot.\n"
NOTE = {"text": "[Keep it short.]", "depth": 2}
BOOK = {"entries": [{"text": "Dogs bark.", "keys": ["dog"], "name": "Dogs"},
                    {"text": "Cows moo.", "keys": ["cow"]}]}  # fmt: skip
READ = f"{MEMORY}Dogs bark.\nOne morning\nthe cat sat.\n[Keep it short.]\nA dog came\nand barked"
GREEDY = {"temperature": 0, "end": False}


def ids_of(lm: Any, text: str) -> list[int]:
    return lm.prompt_ids(text)


def context(tree: Tree, branch: dict[str, Any], **params: Any) -> dict[str, Any]:
    return tree.ask("POST", f"/{branch['id']}/context", json=params)


@pytest.fixture
def story(tree: Tree) -> dict[str, Any]:
    return tree.new(prompt=STORY, memory=MEMORY, author_note=NOTE, lorebook=BOOK, **GREEDY)


def test_the_model_reads_the_parts_and_the_text_has_none_of_them(tree, story, lm):
    resumed = tree.do("resume", story, max_tokens=6)
    expected = lm.generate(READ, max_tokens=6, temperature=0, end=False)
    assert [s["token"] for s in resumed["steps"]] == expected.tokens
    assert [s["logprob"] for s in resumed["steps"]] == pytest.approx(
        [s.logprob for s in expected.steps], abs=1e-4
    )
    assert resumed["prompt"]["text"] == STORY
    first = len(resumed["prompt"]["tokens"])
    assert [s["position"] for s in resumed["steps"]] == list(range(first, first + 6))
    placed = context(tree, story)
    assert [(p["kind"], p["name"], p["keys"]) for p in placed["parts"]] == [
        ("memory", "Memory", []), ("lore", "Dogs", ["dog"]), ("author_note", "Author's note", []),
    ]  # fmt: skip
    tokens = sum(part["tokens"] for part in placed["parts"])
    assert (placed["text_tokens"], placed["tokens"]) == (first + 6, first + 6 + tokens)
    assert resumed["last"]["inserted_tokens"] == tokens
    assert placed["memory"] == MEMORY and placed["lorebook"] == BOOK


def test_a_resumed_text_is_that_of_a_text_without_interruption(tree, lm):
    """Sampling too: random numbers follow the position in the text."""
    params = {"prompt": STORY, "memory": MEMORY, "seed": 5, "temperature": 1.5, "end": False}
    complete = tree.do("resume", tree.new(**params), max_tokens=8)
    parts = tree.do("resume", tree.new(**params), max_tokens=3)
    parts = tree.do("resume", parts, max_tokens=5)
    assert [s["token"] for s in parts["steps"]] == [s["token"] for s in complete["steps"]]
    plain = tree.do("resume", tree.new(**{**params, "memory": None}), max_tokens=8)
    assert [s["token"] for s in plain["steps"]] != [s["token"] for s in complete["steps"]]


def test_memory_stays_cached_and_a_note_costs_what_follows_it(tree, lm):
    memory = "Anna flies over the hills. " * 12
    lines = "\n".join(f"Line {n} of the story." for n in range(12))
    branch = tree.new(prompt=lines, memory=memory, author_note=NOTE, **GREEDY)
    tree.do("resume", branch, max_tokens=1)
    note = {"text": "[Now long and wild.]", "depth": 2}
    resumed = tree.do("resume", branch, max_tokens=1, author_note=note)
    placed = context(tree, branch)["parts"]
    before = len(ids_of(lm, lines[: lines.index("Line 10")])) + placed[0]["tokens"]
    page = 16
    assert resumed["last"]["reused_tokens"] >= before // page * page - page


def test_forks_inherit_the_parts_and_each_is_replaced_alone(tree, story):
    resumed = tree.do("resume", story, max_tokens=2, memory=None, lorebook=None)
    fork = tree.do("fork", resumed)
    assert [part["kind"] for part in context(tree, fork)["parts"]] == ["author_note"]
    tried = context(tree, fork, author_note=None, memory="Only this.")
    assert [part["text"] for part in tried["parts"]] == ["Only this."]
    assert [part["kind"] for part in context(tree, fork)["parts"]] == ["author_note"]  # unchanged
    assert "author_note" not in fork["settings"]


def test_edits_and_choices_are_scored_as_the_model_reads_them(tree, story, lm):
    branch = tree.do("append", story, text=" at the cat. The end came")
    edited = tree.ask(
        "POST", f"/{branch['id']}/edit",
        json={"first": 3, "last": 4, "text": " hat", "fork": True},
    )  # fmt: skip
    edited = tree.get(edited)
    placed = context(tree, edited)
    tokens = [t["id"] for t in edited["prompt"]["tokens"]] + [s["token"] for s in edited["steps"]]
    inserts = [(part["at"], lm.tokenizer.encode(part["text"].rstrip("\n") + "\n"))
               for part in placed["parts"]]  # fmt: skip
    for at, ids in reversed(inserts):
        tokens[at:at] = ids
    num_after = len(edited["steps"])
    assert all(at <= len(edited["prompt"]["tokens"]) for at, _ in inserts)
    expected = [p.logprob for p in lm.score(tokens).positions][-num_after:]
    assert [s["logprob"] for s in edited["steps"]] == pytest.approx(expected, abs=0.05)


def test_a_note_within_the_written_text_is_scored_in_its_place(tree, lm):
    branch = tree.new(prompt="Once", author_note={"text": "[Note]", "depth": 1}, **GREEDY)
    branch = tree.do("append", branch, text=" a cat\nand a dog\nwent out.")
    edited = tree.ask("POST", f"/{branch['id']}/edit", json={"first": 0, "last": 1, "text": "Then"})
    edited = tree.get(edited)
    (part,) = context(tree, edited)["parts"]
    ids = [t["id"] for t in edited["prompt"]["tokens"]] + [s["token"] for s in edited["steps"]]
    at = part["at"]
    assert lm.tokenizer.decode(ids[at:]) == "went out."
    note = lm.tokenizer.encode("[Note]\n")
    with_note = [p.logprob for p in lm.score(ids[:at] + note + ids[at:]).positions]
    num_prompt = len(edited["prompt"]["tokens"])
    expected = with_note[num_prompt:at] + with_note[at + len(note) :]
    assert [s["logprob"] for s in edited["steps"]] == pytest.approx(expected, abs=0.05)


def test_in_a_chat_parts_are_system_messages(tree, lm):
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    branch = tree.new(prompt=None, messages=messages, memory="Anna is a pilot.",
                      author_note={"text": "Be brief.", "depth": 1}, **GREEDY)  # fmt: skip
    branch = tree.do("resume", branch, max_tokens=4)
    branch = tree.do("append", branch, message={"role": "user", "content": "And the sea?"})
    placed = context(tree, branch)
    ids = [t["id"] for t in branch["prompt"]["tokens"]] + [s["token"] for s in branch["steps"]]
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    expected = lm.chat_template.encode(
        [
            {"role": "system", "content": default},
            {"role": "system", "content": "Anna is a pilot."},
            *messages,
            {"role": "assistant", "content": "".join(s["text"] for s in branch["steps"][:4])},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "And the sea?"},
        ]
    )
    read = ""
    start = 0
    for part in placed["parts"]:
        read += "".join(map(lm.tokenizer.token_text, ids[start : part["at"]]))
        frame = [span for span in expected.spans if span.role == "system"]
        number = 1 if part["kind"] == "memory" else 2
        span = expected.ids[frame[number].start : frame[number].end]
        assert part["tokens"] == len(span)
        read += "".join(map(lm.tokenizer.token_text, span))
        start = part["at"]
    read += "".join(map(lm.tokenizer.token_text, ids[start:]))
    assert read == "".join(map(lm.tokenizer.token_text, expected.ids))
    branch = tree.do("resume", branch, max_tokens=3)
    answer = lm.generate(expected.ids, max_tokens=3, temperature=0, end=False)
    assert [s["token"] for s in branch["steps"]][-3:] == answer.tokens


def test_what_cannot_be_is_refused(tree, story):
    long = "word " * 9000
    assert "tokens together" in str(tree.do("resume", story, 400, max_tokens=1, memory=long))
    for params in (
        {"lorebook": {"entries": [{"text": "x", "keys": ["/(/"]}]}},
        {"lorebook": {"entries": [{"text": "x", "keys": [""]}]}},
        {"author_note": {"text": "x", "depth": -1}},
        {"author_note": {"depth": 1}},
        {"memory": 5},
        {"endless": True},
    ):
        tree.do("resume", story, 400, max_tokens=1, **params)
    assert [p["kind"] for p in context(tree, story)["parts"]] == ["memory", "lore", "author_note"]
