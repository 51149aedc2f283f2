"""`unspool sessions` and `unspool chat --continue`, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from unspool.store.folder import StateFolder


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
