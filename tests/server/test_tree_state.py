"""Stored state: what was acknowledged is there after a restart, and a branch continues its text."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from helpers.running_server import running
from helpers.tree_client import Tree, read, tokens
from unspool.errors import UnspoolError
from unspool.server.tree.branch_json import branch_store
from unspool.server.tree.storage import TreeStorage
from unspool.store.database import Database
from unspool.store.folder import FolderInUseError, StateFolder
from unspool.store.library import open_library


@contextmanager
def serving(entry: Any, folder: Path, **settings: Any) -> Iterator[Tree]:
    with running([entry], state=folder, **settings) as server:
        tree = Tree(server.url)
        tree.state = server.state  # type: ignore[attr-defined]
        yield tree


def everything(tree: Tree) -> dict[str, Any]:
    """All that a client can see, but for when it was last used."""
    sessions = tree.ask("GET", "/sessions")["data"]
    return {
        "branches": [tree.get(item) for item in tree.ask("GET", "")["data"]],
        "sessions": [tree.ask("GET", f"/sessions/{item['id']}") for item in sessions],
        "list": sessions,
    }


def test_a_restart_changes_nothing(small_entry: Any, tmp_path: Path):
    with serving(small_entry, tmp_path) as tree:
        session = tree.ask("POST", "/sessions", json={"tags": ["sea", "two words"]})
        branch = tree.do("resume", tree.new(session=session["id"], max_tokens=30, stop=["zzz"]))
        fork = tree.do("choose", branch, at=12, text=" Bonn 🙂", name="detour")
        fork = tree.do("resume", fork, max_tokens=5)
        tree.do("rewind", branch, to=25)
        tree.do("append", branch, text=" the end")
        marks = [{"at": -1, "label": "start"}, {"at": 3, "label": "here"}]
        tree.ask("PATCH", f"/{fork['id']}", json={"bookmarks": marks})
        question = [{"role": "user", "content": "Name a colour."}]
        chat = tree.do("resume", tree.ask("POST", "", json={"messages": question, "seed": 2}))
        copy = tree.ask("POST", f"/sessions/{session['id']}/duplicate")
        tree.ask("PATCH", f"/sessions/{copy['id']}", json={"title": "Copy", "view": {"a": [1]}})
        with tree.live(branch, n=2, max_tokens=3) as answer:
            assert [name for name, *_ in read(answer)].count("done") == 2
        deleted_branch = tree.new(session=session["id"])
        tree.ask("DELETE", f"/{deleted_branch['id']}")
        before = everything(tree)
    assert len(before["branches"]) == 7
    with serving(small_entry, tmp_path) as tree:
        assert all(item.unloaded for item in branch_store(tree.state).all.values())  # type: ignore
        after = everything(tree)
        for old, new in zip(before["branches"], after["branches"], strict=True):
            assert {name: new[name] for name in old if new[name] != old[name]} == {}
        assert after == before
        tree.get(deleted_branch, 404)
        assert tree.ask("POST", f"/{deleted_branch['id']}/restore")["id"] == deleted_branch["id"]
        matches = tree.ask("GET", "/sessions", params={"query": "BONN"})["data"]
        assert {item["id"] for item in matches} == {session["id"], copy["id"]}
        assert not tree.ask("GET", "/sessions", params={"query": "giraffe"})["data"]
        assert (
            tree.new(max_tokens=3)["model"] == branch["model"]
        )  # its vocabulary is stored already
        again = tree.ask("POST", f"/{fork['id']}/fork", json={"at": 13})
        assert tree.get(again)["steps"] == tree.get(fork)["steps"][:13]
        extra = {"role": "user", "content": "And another one?"}
        assert tree.do("append", chat, message=extra)["length"] > chat["length"]


@pytest.mark.parametrize(
    "options",
    [{}, {"regex": "[a-z ]*"}, {"guard": ["loop"]}, {"temperature": 0}, {"speculate": "lookup"}],
    ids=str,
)
def test_a_branch_continues_as_if_nothing_had_happened(
    small_entry: Any, tmp_path: Path, options: Any
):
    with serving(small_entry, tmp_path) as tree:
        complete = tree.do("resume", tree.new(max_tokens=40, **options))
        branch = tree.do("resume", tree.new(max_tokens=15, **options))
        assert tokens(complete)[:15] == tokens(branch)
    with serving(small_entry, tmp_path) as tree:
        result = tree.do("resume", branch, max_tokens=25)
        assert tokens(result) == tokens(complete) and result["text"] == complete["text"]
        assert [step["draw"] for step in result["steps"]] == [s["draw"] for s in complete["steps"]]


def test_more_branches_than_memory_holds(small_entry: Any, tmp_path: Path):
    with serving(small_entry, tmp_path, max_branches=3) as tree:
        names = [tree.do("resume", tree.new(seed=n, max_tokens=4)) for n in range(8)]
        assert len(branch_store(tree.state).loaded) <= 3  # type: ignore[attr-defined]
        listed = tree.ask("GET", "")
        assert len(listed["data"]) == 8 and listed["next"] is None
        first = tree.ask("GET", "", params={"limit": 5})
        second = tree.ask("GET", "", params={"limit": 5, "cursor": first["next"]})
        assert first["data"] + second["data"] == listed["data"] and second["next"] is None
        two = [names[1]["id"], "branch-none", names[6]["id"]]
        listed = tree.ask("GET", "", params={"id": two})
        assert [branch["id"] for branch in listed["data"]] == [two[2], two[0]]
        tree.ask("GET", "", 400, params={"cursor": "1.2.3:x"})
        for branch in names:
            assert tree.get(branch)["steps"] == branch["steps"]
        again = tree.do("resume", names[0], max_tokens=2)
        assert tokens(again)[:4] == tokens(names[0])


def test_a_second_process_gets_an_error_that_names_the_first(tmp_path: Path):
    with StateFolder(tmp_path) as folder:
        with pytest.raises(FolderInUseError, match=r"in use by process \d+ \(unspool.*--state"):
            StateFolder(tmp_path)
        folder.close()
        with StateFolder(tmp_path):
            pass


def test_a_newer_database_is_refused_and_a_damaged_one_moved_aside(tmp_path: Path):
    file = tmp_path / "texts.db"
    Database(file).close()
    torn = file.read_bytes()[:5000] + b"\xff" * 9000
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(UnspoolError, match="newer Unspool"):
        Database(file)
    for content in (b"this is no database" * 1000, torn):
        file.write_bytes(content)
        messages: list[str] = []
        database = Database(file, say=messages.append)
        assert database.submit(lambda db: db.value("SELECT count(*) FROM branches")).result() == 0
        database.close()
        assert "damaged" in messages[0] and len(messages) == 1
        assert list(tmp_path.glob("texts.db.damaged-*"))
        for aside in tmp_path.glob("texts.db.damaged-*"):
            aside.unlink()


def test_a_cancelled_request_does_not_end_the_writer(tmp_path: Path):
    database, may_go_on = Database(tmp_path / "texts.db"), Event()
    first = database.submit(lambda db: may_go_on.wait(30))
    cancelled, last = (database.submit(lambda db, n=n: n) for n in (1, 2))
    assert cancelled.cancel()
    may_go_on.set()
    assert first.result(30) and last.result(30) == 2
    assert database.submit(lambda db: 3).result(30) == 3
    database.close()
    assert cancelled.cancelled()


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A small disk mounted in a folder; skips where mounting one is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_and_one_that_is_read_only(small_entry: Any, tmp_path: Path):
    with small_disk(tmp_path / "disk", 6 << 20) as disk:
        state = disk / "state"
        with serving(small_entry, state) as tree:
            branch = tree.do("resume", tree.new(max_tokens=8))
            with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(4096))
            for _ in range(100):  # SQLite's log may have some room left
                answer = tree.http.post("/v1/tree/sessions", json={"view": {"x": "y" * 40_000}})
                if answer.status_code != 200:
                    break
            assert answer.status_code == 507 and "not stored" in answer.text
            assert tree.get(branch)["steps"] == branch["steps"]
            tree.do("append", branch, 507, text=" word" * 100)
            assert tree.get(branch)["steps"] == branch["steps"]
            (disk / "ballast").unlink()
            result = tree.do("resume", branch, max_tokens=3)
            assert result["length"] == 11
        with serving(small_entry, state) as tree:
            assert tree.get(branch)["length"] == 11
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(UnspoolError, match=r"cannot be used.*ead-only"):
            StateFolder(state)
        with open_library(state) as db:  # reading is possible
            assert db.value("SELECT count(*) FROM branches") == 1
        with serving(small_entry, state) as tree:
            assert tree.do("resume", branch, max_tokens=2)["length"] == 13
        with serving(small_entry, state) as tree:
            assert tree.get(branch)["length"] == 11


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_folder_that_can_only_be_read(
    small_entry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_killed: bool
):
    """As root the mode of a folder is not respected, so the system's answers are replaced."""
    state = tmp_path / "state"
    with serving(small_entry, state) as tree:
        branch = tree.do("resume", tree.new(max_tokens=300, temperature=0))
        assert tree.ask("GET", "/sessions")["is_saved"]
        if was_killed:  # the write-ahead log is still there
            shutil.copytree(state, tmp_path / "copy")
    if was_killed:
        state = tmp_path / "copy"
        assert (state / "texts.db-wal").stat().st_size > 0
    stored = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    connect = sqlite3.connect

    def refuse(name: Any, *arguments: Any, **options: Any) -> Any:
        if Path(str(name).removeprefix("file://").partition("?")[0]).is_relative_to(state):
            raise sqlite3.OperationalError("unable to open database file")
        return connect(name, *arguments, **options)

    access = os.access
    monkeypatch.setattr(sqlite3, "connect", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK and access(path, mode))
    with pytest.raises(UnspoolError, match="cannot be used: Permission denied"):
        StateFolder(state)
    with open_library(state) as db:
        assert db.value("SELECT count(*) FROM branches") == 1
    with serving(small_entry, state) as tree:
        assert not tree.ask("GET", "/sessions")["is_saved"]
        assert tree.get(branch)["steps"] == branch["steps"]
        resumed = tree.do("resume", branch, max_tokens=2)
        assert resumed["length"] == 302
        assert was_killed or resumed["last"]["reused_tokens"] > 256  # of stored pages
        assert not tree.ask("GET", "/sessions")["is_saved"]
    with serving(small_entry, state) as tree:
        assert tree.get(branch)["length"] == 300
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == stored


def test_texts_of_a_damaged_database_are_saved_from_it(small_entry: Any, tmp_path: Path):
    """Each page of the database is overwritten in turn: what the others hold is still there."""
    with serving(small_entry, tmp_path) as tree:
        for number in range(12):
            session = tree.ask("POST", "/sessions", json={"title": f"Text {number}"})["id"]
            tree.new(session=session, prompt=f"Prompt {number} " * 20, seed=number)
        tree.do("resume", tree.new(max_tokens=40))
        (served,) = tree.state.registry.loaded.values()  # type: ignore[attr-defined]
        tokenizer = served.lm.tokenizer
    file, other = tmp_path / "texts.db", tmp_path / "other.db"
    content = file.read_bytes()
    numbers = []
    for at in range(4096, len(content), 8192):
        damaged = bytearray(content)
        damaged[at : at + 4096] = bytes(range(256)) * 16
        other.write_bytes(damaged)
        messages: list[str] = []
        database = Database(other, say=messages.append)
        stored = TreeStorage(database, lambda: [tokenizer])
        branches = stored.read_branches()
        for branch in branches:  # none is there in part
            stored_content = database.submit(stored.reading(branch)).result()
            prompt, generation, _ = stored_content.decode()
            assert prompt.text and len(generation.steps) == branch.digest.length
        stored.index_remaining()
        names = database.submit(lambda db: db.rows("SELECT title FROM sessions")).result()
        assert len(database.submit(lambda db: db.search("Text")).result()) <= len(branches)
        numbers.append((len(names), len(branches)))
        database.close()
        for path in tmp_path.glob("other.db*"):
            path.unlink()
        assert all("what could be read of it" in message for message in messages)
    assert sum(number == (12, 13) for number in numbers) > len(numbers) / 2
    assert sum(sum(number) > 0 for number in numbers) > len(numbers) * 0.8, numbers


def test_a_full_disk_refuses_the_change_and_damages_nothing(small_entry: Any, tmp_path: Path):
    with serving(small_entry, tmp_path) as tree:
        branch = tree.do("resume", tree.new(max_tokens=8))
        database = tree.state.database  # type: ignore[attr-defined]

        def limit(pages: int) -> None:
            database.submit(lambda db: db.value(f"PRAGMA max_page_count={pages}")).result()

        limit(1)  # SQLite allows no page more than there are
        for _ in range(100):
            answer = tree.http.post("/v1/tree/sessions", json={"view": {"x": "y" * 40_000}})
            if answer.status_code != 200:
                break
        assert answer.status_code == 507 and "disk is full" in answer.text
        assert tree.get(branch)["steps"] == branch["steps"]
        tree.do("append", branch, 507, text=" word" * 100)
        assert tree.get(branch)["steps"] == branch["steps"]
        before = len(tree.ask("GET", "/sessions")["data"])
        limit(1 << 30)
        tree.do("resume", branch, max_tokens=3)
        assert tree.get(branch)["length"] == 11
    with serving(small_entry, tmp_path) as tree:
        assert len(tree.ask("GET", "/sessions")["data"]) == before
        assert tree.get(branch)["length"] == 11
