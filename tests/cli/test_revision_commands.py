"""`unspool fill` and `unspool edit`, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unspool import gap
from unspool.cli.revision import split_at
from unspool.errors import SettingsError

TEXT = "The scheduler plans rows, and the tree builder makes a step of them.\nIt is done.\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    return path


# -- fill --------------------------------------------------------------------------------------


def test_a_gap_in_a_text(unspool: Any, words: Any):
    expected = words.fill("The ", gap(1, 2), " of the tree", candidates=6)
    arguments = ["fill", "The ___ of the tree", "--tokens", "1-2", "--candidates", "6"]
    code, out, _ = unspool(*arguments, "--show", "3")
    lines = out.splitlines()
    assert code == 0 and lines[0] == expected.text
    assert "probability" in lines[1] and len(lines) == 6
    assert f"{expected.chosen.score:.2f}" in lines[2] and "3 not shown" in lines[-1]
    assert unspool(*arguments, "-q")[1] == expected.text + "\n"
    reported = json.loads(unspool(*arguments, "--json")[1])
    assert [c["texts"] for c in reported["candidates"]] == [
        list(c.texts) for c in expected.candidates
    ]


def test_choices_and_stdin(unspool: Any):
    code, out, _ = unspool("fill", "-", "--choice", "page", "--choice", "row", "-q",
                       stdin="a ___ of the tree\n")  # fmt: skip
    assert code == 0 and out.strip() in ("a page of the tree", "a row of the tree")


def test_a_place_in_a_file(unspool: Any, file: Path):
    before = file.read_bytes()
    choices = ("--choice", "page", "--choice", "row", "-q")
    code, out, _ = unspool("fill", str(file), "--at", "1:35-39", *choices)
    assert code == 0 and file.read_bytes() == before
    assert out in (before.decode().replace("tree", word) + "\n" for word in ("page", "row"))
    code, out, _ = unspool("fill", str(file), "--at", "2", "--choice", "So it is.")
    assert code == 0 and "So it is." in out and "It is done" not in out
    assert out.startswith("…")  # of a file, what stands around the gap


@pytest.mark.parametrize(
    ("at", "prefix", "suffix"),
    [
        ("1:1", "", "ab\ncd\n"),
        ("2:2", "ab\nc", "d\n"),
        ("1:2-3", "a", "\ncd\n"),
        ("1:3-2:1", "ab", "cd\n"),
        ("2", "ab\n", "\n"),
    ],
)
def test_places(at: str, prefix: str, suffix: str):
    assert split_at("ab\ncd\n", at) == (prefix, None, suffix)


@pytest.mark.parametrize("at", ["x", "3", "1:4", "1:0", "2:1-1:1", "1-2", ""])
def test_places_that_are_none(at: str):
    with pytest.raises(SettingsError, match="--at"):
        split_at("ab\ncd\n", at)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing to fill"], "three underscores"),
        (["a ___ b", "--tokens", "many"], "--tokens"),
        (["missing.txt", "--at", "1"], "no file"),
        (["a ___ b", "--by", "magic"], "by must be"),
    ],
)
def test_mistakes_are_refused(unspool: Any, arguments: list[str], message: str):
    code, out, err = unspool("fill", *arguments)
    assert code == 2 and out == "" and message in err


# -- edit --------------------------------------------------------------------------------------

FEW = ("--passes", "1", "--places", "3", "--threshold", "0.2", "--trust", "0")


def test_changes_are_shown_and_the_file_stays(unspool: Any, file: Path, words: Any):
    before = file.read_bytes()
    code, out, err = unspool("edit", str(file), *FEW)
    created = words.edit(before.decode(), passes=1, places=3, threshold=0.2, trust=0)
    assert code == 0 and created.applied and file.read_bytes() == before
    change = created.applied[0]
    assert f"[-{change.old}-]" in out and f"{{+{change.new}+}}" in out
    assert f"{change.probability:.1%}" in out and "perplexity" in out and "--apply" in err


def test_apply_writes_and_keeps_line_ends(unspool: Any, file: Path, words: Any):
    file.chmod(0o640)
    text = file.read_bytes().decode()
    created = words.edit(text, passes=1, places=3, threshold=0.2, trust=0)
    code, _, err = unspool("edit", str(file), *FEW, "--apply")
    assert code == 0 and "changes written" in err
    assert file.read_bytes().decode() == created.text != text and "\r\n" in created.text
    assert file.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in file.parent.iterdir()] == ["text.txt"]


def test_diff_and_json(unspool: Any, file: Path):
    code, out, _ = unspool("edit", str(file), *FEW, "--diff")
    assert code == 0 and out.startswith(f"--- {file}") and "\n-" in out and "\n+" in out
    reported = json.loads(unspool("edit", str(file), *FEW, "--json")[1])
    assert reported["changes"] and reported["original"] == file.read_bytes().decode()
    code, out, _ = unspool("edit", str(file), *FEW, "--budget", "0", "--diff")
    assert (code, out) == (0, "")


def test_standard_input(unspool: Any):
    code, out, err = unspool("edit", "-", *FEW, stdin="The page of the tree is a row.\n")
    assert code == 0 and "perplexity" in out and "--apply" not in err
    code, _, err = unspool("edit", "-", "--apply", stdin="x")
    assert code == 2 and "got standard input" in err


def test_a_file_that_cannot_be_edited(unspool: Any, tmp_path: Path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "UTF-8" in unspool("edit", str(tmp_path / "bytes"))[2]
    assert "no file" in unspool("edit", str(tmp_path / "none"))[2]
    assert "not both" in unspool("edit", str(tmp_path / "none"), "--diff", "--json")[2]
