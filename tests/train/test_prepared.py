"""Prepared data: what is in the files, made once, never half there, in constant memory."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unspool.errors import DataError, SettingsError
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data import prepared
from unspool.train.data.prepared import PackedDocuments, PreparedData, prepare
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe

ROOT = Path(__file__).parents[2]
WORDS = ROOT.joinpath("tests", "data", "training_text.md").read_text(encoding="utf-8")
ROWS = [f"Document {n}. {WORDS[n * 40 : n * 40 + 100]}" for n in range(200)]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    chosen = TokenizerSettings(500)
    save_tokenizer_files(train_bpe([WORDS], chosen), chosen, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(tokenizer_folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rows_file(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_in(packed: PackedDocuments, tokenizer: Tokenizer) -> list[str]:
    bounds = zip(packed.offsets[:-1], packed.offsets[1:], strict=True)
    return [tokenizer.decode(packed.ids[begin:end].tolist()) for begin, end in bounds]


def test_what_was_written_is_read_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = rows_file(tmp_path / "a.jsonl", [*ROWS, "", ROWS[5], ROWS[7]])
    prepared = prepare(file, tokenizer, held_out=0.05)
    train, held_out = (texts_in(p, tokenizer) for p in (prepared.train, prepared.held_out))
    assert sorted([*train, *held_out]) == sorted(row + "<|endoftext|>" for row in ROWS)
    assert [text for text in (row + "<|endoftext|>" for row in ROWS) if text in train] == train
    card = prepared.card
    assert (card.documents, card.held_out_documents) == (190, 10)
    assert (card.duplicates, card.empty, card.kind, card.dtype) == (2, 1, "text", "uint16")
    assert card.tokens == len(prepared.train.ids) == card.counted_tokens
    assert card.held_out_tokens == len(prepared.held_out.ids)
    assert card.bytes + card.held_out_bytes == sum(len(row.encode()) for row in ROWS)
    assert card.bytes_per_token == pytest.approx(card.bytes / card.tokens)
    assert card.longest == max(np.diff(prepared.train.offsets))
    assert isinstance(prepared.train.ids, np.memmap) and prepared.train.ids.dtype == np.uint16
    assert prepared.train.loss_mask is None


def test_control_tokens_in_a_text_are_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = rows_file(tmp_path / "a.jsonl", ["one <|endoftext|> two", "three <|im_end|>"])
    prepared = prepare(file, tokenizer, held_out=0)
    assert prepared.card.held_out_documents == 0 and len(prepared.held_out.ids) == 0
    assert np.isin(prepared.train.ids, [0, 1, 2]).sum() == 2  # one end a document


def test_prepared_once_and_found_again(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = rows_file(tmp_path / "a.jsonl", ROWS)
    first = prepare(file, tokenizer)

    def no_work(*given: Any) -> Any:
        raise AssertionError("prepared again")

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "survey", no_work)
        file.rename(tmp_path / "other name.jsonl")
        assert prepare(tmp_path / "other name.jsonl", tokenizer).folder == first.folder
    file = tmp_path / "other name.jsonl"
    others = [
        prepare(file, tokenizer, seed=1), prepare(file, tokenizer, held_out=0.2),
        prepare(file, tokenizer, limit=50), prepare(rows_file(file, ROWS[:-1]), tokenizer),
    ]  # fmt: skip
    assert len({first.folder, *(other.folder for other in others)}) == 5
    again = PreparedData.open(first.folder)
    assert again.card == first.card and (again.train.ids == first.train.ids).all()
    chosen = TokenizerSettings(400)
    save_tokenizer_files(train_bpe([WORDS], chosen), chosen, tmp_path)
    other = prepare(file, Tokenizer.from_file(tmp_path))
    assert other.folder != others[-1].folder and other.card.vocab_size == 400


def test_what_is_held_out_depends_on_the_seed_and_on_nothing_else(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    def held_out(texts: list[str], **options: Any) -> set[str]:
        file = rows_file(tmp_path / "a.jsonl", texts)
        return set(texts_in(prepare(file, tokenizer, **options).held_out, tokenizer))

    first_item = held_out(ROWS, held_out=0.1)
    assert len(first_item) == 20 and held_out(ROWS[::-1], held_out=0.1) == first_item
    other = held_out(ROWS, held_out=0.1, seed=1)
    assert len(other) == 20 and len(first_item & other) < 10
    assert len(held_out(ROWS)) == 4  # one in a hundred would be two: too few to judge by
    assert len(held_out(ROWS[:3])) == 1


def test_what_others_held_out_stays_held_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows_file(tmp_path / "train.jsonl", [*ROWS[:50], ROWS[60]])
    rows_file(tmp_path / "valid.jsonl", ROWS[60:70])
    prepared = prepare(tmp_path, tokenizer)
    result = texts_in(prepared.held_out, tokenizer)
    assert result == [row + "<|endoftext|>" for row in ROWS[60:70]]
    # What is in both is only judged by, and never learned.
    assert prepared.card.documents == 50 and prepared.card.duplicates == 1
    given = prepare(tmp_path / "train.jsonl", tokenizer, held_out=str(tmp_path / "valid.jsonl"))
    assert texts_in(given.held_out, tokenizer) == result


def test_a_large_vocabulary_needs_wide_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    described = json.loads(tokenizer.encoder.library.to_str())  # type: ignore[attr-defined]
    for number in range(500, 70_000):
        described["model"]["vocab"][f"Ġ{number}x"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    file = rows_file(tmp_path / "a.jsonl", ROWS[:10])
    prepared = prepare(file, Tokenizer.from_file(tmp_path))
    assert prepared.card.dtype == "uint32" and prepared.train.ids.dtype == np.uint32


def test_one_long_text_is_one_stream(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Parts of a text follow each other without an end between them, and some are held out."""
    (tmp_path / "book.txt").write_text(WORDS)
    prepared = prepare(tmp_path / "book.txt", tokenizer, held_out=0)
    assert tokenizer.decode(prepared.train.ids.tolist()) == WORDS + "<|endoftext|>"
    assert prepared.train.num_documents > 4
    some = prepare(tmp_path / "book.txt", tokenizer)
    assert some.held_out.num_documents > 0
    assert some.card.bytes + some.card.held_out_bytes == len(WORDS.encode())


def test_a_source_that_changes_meanwhile(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    file = rows_file(tmp_path / "a.jsonl", ROWS)
    survey = prepared.survey

    def changed(*given: Any) -> Any:
        result = survey(*given)
        rows_file(file, ROWS[1:])
        return result

    monkeypatch.setattr(prepared, "survey", changed)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(file, tokenizer)
    assert [item.suffix for item in (cache / "prepared").iterdir()] in ([".lock"], [])


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DataError, "the disk is full .* free"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_an_error_leaves_nothing_behind(
    error: BaseException, expected: Any, message: Any, tmp_path: Path, tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch, cache: Path,
) -> None:  # fmt: skip
    file = rows_file(tmp_path / "a.jsonl", ROWS)
    reports: list[tuple[str, int, int]] = []

    def fail(*arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(prepared._SplitWriter, "add", fail)
        with pytest.raises(expected, match=message):
            prepare(file, tokenizer)
    assert not list(cache.glob("prepared/*/*"))
    complete = prepare(file, tokenizer, progress=lambda *report: reports.append(report))
    assert complete.card.documents == 196
    what, done, total = reports[-1]
    assert what == "encoding" and 0 < done <= total


def test_what_cannot_be_prepared(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"no text to learn from: .*empty\.txt is empty"):
        prepare(tmp_path / "empty.txt", tokenizer)
    with pytest.raises(SettingsError, match="< 1"):
        prepare(rows_file(tmp_path / "a.jsonl", ROWS), tokenizer, held_out=1.5)
    with pytest.raises(DataError, match="has no valid prepared data"):
        PreparedData.open(tmp_path)


PREPARE = """
import resource, sys
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.prepared import prepare
prepared = prepare(sys.argv[1], Tokenizer.from_file(sys.argv[2]))
print(prepared.card.tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def many_rows(path: Path, megabytes: int) -> Path:
    line = f"{'long' * 50} {'words' * 40} " * 5  # the same again: quickly encoded
    with path.open("w") as file:
        for number in range(megabytes * 500):
            file.write(json.dumps({"text": f"{number} {line}"}) + "\n")
    return path


def test_killed_in_the_middle(tmp_path: Path, tokenizer_folder: Path, cache: Path) -> None:
    """What is left is never taken for prepared data, and the next one clears it away."""
    file = many_rows(tmp_path / "a.jsonl", 12)
    command = [sys.executable, "-c", PREPARE, str(file), str(tokenizer_folder)]
    child = subprocess.Popen(command)
    part, deadline = None, time.monotonic() + 120
    while part is None and time.monotonic() < deadline:
        written = cache.glob("prepared/*.part/train.ids")
        part = next((item for item in written if item.stat().st_size > 0), None)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert part is not None and not list(cache.glob("prepared/*/card.json"))
    rows_file(file, ROWS)  # quicker; and a part of another preparation does no harm
    tokenizer = Tokenizer.from_file(tokenizer_folder)
    assert prepare(file, tokenizer).card.documents == 196
    fresh = part.parent.with_suffix("")
    prepared.build_once(fresh, lambda folder: (folder / "whole").write_text("yes") and None)
    assert (fresh / "whole").is_file() and not part.exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path, tokenizer_folder: Path) -> None:
    peaks = []
    for megabytes in (4, 20):
        file = many_rows(tmp_path / f"{megabytes}.jsonl", megabytes)
        command = [sys.executable, "-c", PREPARE, str(file), str(tokenizer_folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[1]))
    # The text alone would take 16 MB more, and its ids 40.
    assert peaks[1] - peaks[0] < 30, f"{peaks} MB"


def test_two_processes_at_once(tmp_path: Path, tokenizer_folder: Path, cache: Path) -> None:
    file = rows_file(tmp_path / "a.jsonl", ROWS)
    command = [sys.executable, "-c", PREPARE, str(file), str(tokenizer_folder)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    output = [child.communicate()[0].split()[0] for child in children]
    assert output[0] == output[1] and len(list(cache.glob("prepared/*/card.json"))) == 1
