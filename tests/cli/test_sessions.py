"""`unspool sessions`, `unspool chat --continue` and `unspool futures`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.foreign_files import LOOM, MIKUPAD, OPENLOOM, OPENLOOM_2, TAVERN, lines
from unspool.errors import UnspoolError
from unspool.store.folder import StateFolder
from unspool.store.formats import FORMATS, PortableText, read_texts, write_texts


def run(folder: Path, *arguments: str, lines: str = "", code: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "unspool", *arguments],
        input=lines,
        capture_output=True,
        text=True,
        env={**os.environ, "UNSPOOL_STATE": str(folder)},
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done


def test_a_chat_is_stored_continued_shown_and_deleted(small_default: Path, tmp_path: Path):
    folder = tmp_path / "state"
    chat = ("chat", "--model", str(small_default), "--seed", "1", "--max-tokens", "6", "--quiet")
    complete = run(tmp_path / "other", *chat, lines="Name a colour.\nAnd another one?\n").stdout
    assert "there are no stored texts" in run(folder, "sessions", code=2).stderr
    first = run(folder, *chat, lines="Name a colour.\n").stdout
    second = run(folder, *chat, "--continue", "last", lines="And another one?\n")
    assert first + second.stdout == complete
    assert "continuing 'Name a colour.': 1 turn" in second.stderr
    (session,) = json.loads(run(folder, "sessions", "list", "--json").stdout)
    assert session["title"] == "Name a colour." and session["branches"] == 1
    name = session["id"].removeprefix("session-")[:8]
    assert name in run(folder, "sessions").stdout
    printed = run(folder, "sessions", "show", name).stdout
    assert (
        printed.startswith("user: Name a colour.\n\nassistant: ") and "user: And another" in printed
    )
    run(folder, "sessions", "export", name, str(tmp_path / "chat.txt"))
    assert (tmp_path / "chat.txt").read_text().strip() == printed.strip()
    undone = run(folder, *chat, "--continue", name, lines="/undo\n/undo\n")
    assert "removed: And another one?" in undone.stderr
    run(folder, "sessions", "show", "none", code=2)
    with StateFolder(folder):  # in use: reading is possible, changing is not
        assert name in run(folder, "sessions").stdout
        assert "in use by process" in run(folder, "sessions", "delete", name, code=2).stderr
        assert "in use by process" in run(folder, *chat, "--continue", "last", code=2).stderr
        assert "is not stored" in run(folder, *chat, lines="Hi\n").stderr
    run(folder, "sessions", "delete", name)
    assert json.loads(run(folder, "sessions", "list", "--json").stdout) == []


def chat(*turns: str) -> PortableText:
    """A conversation that a user starts, perhaps after a system message."""
    roles = ["system", "user", "assistant"] * len(turns)
    system = ["Be brief."] if turns[0] == "Hi" else []
    names = roles[: len(system)] + ["user", "assistant"] * len(turns)
    messages = [
        {"role": role, "content": text}
        for role, text in zip(names, [*system, *turns], strict=False)
    ]
    return PortableText("A talk", "", messages)


CHATS = [
    chat("Hi", "Hello.\n## user", "And?", "Or."),
    chat("Hi", "Hello.\n## user", "And?", "Nor."),
    chat("Hi", "Yes, \U0001f98a?"),
]
STORIES = [
    PortableText("Story", f"The sea{end}") for end in (" was calm.\n\nIt", " was wide", " rose")
]


def contents(texts: list[PortableText]) -> list[Any]:
    return [text.messages or text.text for text in texts]


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_exported_is_read_again(kind: str):
    for texts in (CHATS, STORIES):
        only_first = ["markdown", "text", "mikupad"]
        has_one = kind in [*only_first, *(["sillytavern"] if texts is STORIES else [])]
        written = write_texts(texts[:1] if has_one else texts, kind)
        sessions = read_texts(written.encode(), texts[0].title or "")
        stored = contents([text for session in sessions for text in session])
        expected = contents(texts[:1] if has_one else texts)
        if kind in ("loom", "mikupad", "text") and texts is CHATS:  # with the roles in the text
            assert all(isinstance(text, str) for text in stored)
            assert "user: Hi\n\nassistant: Hello." in stored[0] and "And?" in stored[0]
            assert len(stored) == len(expected)
        elif kind in ("messages", "sharegpt", "sillytavern") and texts is STORIES:
            assert stored == [[{"role": "user", "content": text}] for text in expected]
        elif kind == "text":
            assert stored == [f"{expected[0]}\n"]
        elif kind == "sillytavern":  # the first version, and other versions of its answers
            first, swipe = expected[0], expected[2]
            assert first in stored and swipe in stored
        else:
            assert stored == expected
        assert sessions[0][0].title in (None, texts[0].title)


def test_files_of_other_programs():
    def read(content: Any) -> list[list[PortableText]]:
        text = content if isinstance(content, str) else json.dumps(content)
        return read_texts(text.encode(), "file")

    (tavern,) = read(TAVERN)
    assert [text.messages[-1]["content"] for text in tavern if text.messages] == [
        "In a forest.", "Thanks!", "Safe."]  # fmt: skip
    assert tavern[0].title == "Seraphina"
    for file in (LOOM, LOOM["root"], [LOOM["root"]]):
        assert contents(*read(file)) == ["The sea was calm.", "The sea rose."]
    chunks = json.loads(MIKUPAD["prompt"])
    all_of_it = {"Sessions": [{"key": 1, "value": {"prompt": chunks}}, {"key": "x", "value": 3}],
                 "Names": [{"key": 1, "value": "A"}]}  # fmt: skip
    for file, title in ((MIKUPAD, "MikuPad #2"), (all_of_it, "A")):
        ((story,),) = read(file)
        assert (story.title, story.text) == (title, "Once upon a time, said I")
    for file in (OPENLOOM, OPENLOOM_2):
        (talk,) = read(file)
        assert [[m["content"] for m in text.messages or ()] for text in talk] == [
            ["Be brief.", "Hi", "Hello."], ["Be brief.", "Hi", "Yes?"]]  # fmt: skip
    loop = {**OPENLOOM, "nodes": {**OPENLOOM["nodes"], "2": {
        **OPENLOOM["nodes"]["2"], "childrenIds": ["1"]}}}  # fmt: skip
    bad: list[tuple[Any, str]] = [
        ({"hello": 1}, "has no messages"),
        (loop, "two parents or is its own ancestor"),
        ({**OPENLOOM, "rootNodeId": "9"}, "there is no node '9'"),
        ({**OPENLOOM, "nodes": {"1": {"text": 7, "author": "user"}}}, "must be a text, got 7"),
        ({**OPENLOOM, "nodes": {"1": {"text": "x", "author": "robot"}}}, "got 'robot'"),
        ({"format": "open-loom", "trees": []}, "no text"),
        ({"root": {"text": "", "children": [3]}}, "must be an object, got 3"),
        ({**MIKUPAD, "prompt": "[1,"}, "not valid JSON in a string"),
        ({"text": "", "children": [{"text": "x", "children": []}] * 6000}, "more than 5,000"),
        ('{"text":"","children":[' * 9000 + "]}" * 9000, "nested too deeply"),
        (lines({"user_name": "You"}, {"mes": 3, "name": "A"}), "mes must be a text"),
    ]
    for content, words in bad:
        with pytest.raises(UnspoolError, match=words):
            read(content)


def test_import_and_export(unspool: Any, tmp_path: Path):
    state = ("--state", str(tmp_path / "state"))
    for name, content in (("talk.json", OPENLOOM), ("sea.json", LOOM)):
        (tmp_path / name).write_text(json.dumps(content))
        code, printed, stderr = unspool("sessions", "import", str(tmp_path / name), *state)
        assert code == 0 and len(printed.splitlines()) == 1, stderr
    sessions = json.loads(unspool("sessions", "list", "--json", *state)[1])
    assert [(s["title"], s["branches"]) for s in sessions] == [("The sea", 2), ("A talk", 2)]
    sea, talk = (session["id"] for session in sessions)
    for kind in FORMATS:
        for session in (sea, talk):
            branch = ["--branch", branch_of(unspool, session, state)] if kind == "markdown" else []
            file = tmp_path / f"{kind}-{session}"
            code, _, stderr = unspool(
                "sessions", "export", session, str(file), "--format", kind, *branch, *state
            )
            assert code == 0, stderr
            (texts, *_) = read_texts(file.read_bytes(), "file")
            assert texts
            if kind == "openloom":
                expected = [["Be brief.", "Hi", "Hello."], ["Be brief.", "Hi", "Yes?"]]
                stored = [[m["content"] for m in text.messages or ()] for text in texts]
                assert stored == expected if session == talk else len(texts) == 2
            if kind in ("loom", "openloom") and session == sea:
                assert contents(texts) == ["The sea was calm.", "The sea rose."]
    code, _, stderr = unspool("sessions", "export", sea, "--format", "pdf", *state)
    assert code == 2 and "got 'pdf'" in stderr
    code, _, stderr = unspool("sessions", "import", str(tmp_path / "none.json"), *state)
    assert code == 2 and "cannot be read" in stderr
    with StateFolder(tmp_path / "state"):  # in use
        code, _, stderr = unspool("sessions", "import", str(tmp_path / "sea.json"), *state)
        assert code == 2 and "in use by process" in stderr


def branch_of(unspool: Any, session: str, state: tuple[str, str]) -> str:
    session_json = json.loads(unspool("sessions", "show", session, "--json", *state)[1])
    return str(session_json["texts"][0]["branch"])


def test_futures_are_printed(unspool: Any, model: Any):
    code, printed, _ = unspool("futures", "The page", "--mass", "0.02", "--depth", "3", "--json")
    rows = json.loads(printed)
    expected = model.futures("The page", mass=0.02, depth=3)
    assert code == 0 and len(rows) == sum(1 for _ in expected.root.walk()) > 3
    by_number = {row["number"]: row for row in rows}
    for row in rows:
        if row["parent"] is not None:
            parent = by_number[row["parent"]]
            assert row["mass"] == pytest.approx(parent["mass"] * row["probability"])
            assert row["mass"] >= 0.02
    code, printed, _ = unspool("futures", "The page", "--mass", "0.02", "--depth", "3")
    *lines_of_tree, last = printed.strip().splitlines()
    assert code == 0 and f"{len(rows) - 1} tokens, " in last and "of the mass" in last
    assert lines_of_tree and all("%" in line for line in lines_of_tree)
    assert unspool("futures", "The page", "--mass", "2")[0] == 2
    assert unspool("futures", "--chat", "Hi", "--mass", "0.3", "--depth", "1")[0] == 0
