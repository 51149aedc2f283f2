"""What twins learn from: rows of one shape from several sources, and texts a model wrote itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool
from helpers import tiny
from unspool.errors import DataError
from unspool.model.files.checkpoint import open_checkpoint
from unspool.train.data.prepared import PackedDocuments
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.twins import data
from unspool.train.twins.data import Mixture, WritingSettings, generated_texts


def text(count: int = 100) -> PackedDocuments:
    return PackedDocuments(np.arange(count, dtype=np.uint16), np.array([0, 30, count]), None)


def chats() -> PackedDocuments:
    """Documents of 5, 9 and 23 tokens, from 1000 on; the first two of each do not count."""
    borders = np.array([0, 5, 14, 37])
    loss_mask = np.ones(37, bool)
    for begin in borders[:-1]:
        loss_mask[begin : begin + 2] = False
    return PackedDocuments(np.arange(1000, 1037).astype(np.uint16), borders, loss_mask)


def test_text_comes_in_windows_that_know_their_documents():
    batch = Mixture({"text": (text(), 1.0)}, 6, 19).batch(0)
    assert (
        batch.ids.shape == (6, 20)
        and batch.document_ids is not None
        and batch.loss_mask is not None
    )
    for row, documents in zip(batch.ids.tolist(), batch.document_ids.tolist(), strict=True):
        assert row == list(range(row[0], row[0] + 20)) and row[0] % 20 == 0
        assert documents == [int(token >= 30) - int(row[0] >= 30) for token in row[:-1]]
    assert batch.loss_mask.all()


def test_conversations_are_packed_whole_and_the_rest_of_a_row_is_none():
    mixture = Mixture({"chat": (chats(), 1.0)}, 32, 15)
    seen = set()
    batch = mixture.batch(0)
    assert batch.document_ids is not None and batch.loss_mask is not None
    for row, documents, loss_mask in zip(
        batch.ids.tolist(), batch.document_ids.tolist(), batch.loss_mask.tolist(), strict=True
    ):
        there = [token for token in row if token >= 1000]
        seen.update(there)
        assert row[len(there) :] == [0] * (16 - len(there))
        assert all(number == -1 for number in documents[len(there) :])
        for place in range(1, 15):
            follows = row[place] == row[place - 1] + 1 and row[place] not in (1005, 1014)
            same = documents[place] == documents[place - 1] >= 0
            assert not same or follows
        wanted = [t >= 1000 and t not in (1000, 1001, 1005, 1006, 1014, 1015) for t in row]
        assert loss_mask == wanted[1:]
    assert seen == set(range(1000, 1037))  # the long one in two pieces


def test_batches_are_functions_of_their_number_and_shares_are_kept():
    sources = {"text": (text(), 0.25), "chat": (chats(), 0.75)}
    one, other = (Mixture(sources, 400, 15, seed=3) for _ in range(2))
    assert (one.batch(5).ids == other.batch(5).ids).all()
    assert (one.batch(5).ids != one.batch(6).ids).any()
    share = float((one.batch(5).ids[:, 0] < 1000).float().mean())
    assert 0.17 < share < 0.33
    with pytest.raises(DataError, match="text has too few tokens"):
        Mixture({"text": (text(10), 1.0), "chat": (chats(), 1.0)}, 4, 15)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "PART", 4)
    tiny.save("llama", tmp_path / "model")
    settings = TokenizerSettings(vocab_size=259)
    save_tokenizer_files(train_bpe([], settings), settings, tmp_path / "model")
    return tmp_path / "model"


def write(model: Path, texts: int, loads: list[int], **more: Any) -> PackedDocuments:
    def load() -> Any:
        loads.append(texts)
        return unspool.load(model, backend="torch")

    settings = WritingSettings(texts=texts, max_tokens=8, question_tokens=24, questions=("Why?",))
    return generated_texts(model, open_checkpoint(model).config, settings, load, **more)


def test_texts_are_written_once_and_gone_on_with(model: Path):
    loads: list[int] = []
    first = write(model, 4, loads)
    assert first.num_documents >= 2 and first.loss_mask is not None
    more = write(model, 8, loads)
    assert more.num_documents > first.num_documents
    assert (more.ids[: len(first.ids)] == first.ids).all()  # the same texts, followed by others
    assert (write(model, 8, loads).ids == more.ids).all()
    assert loads == [4, 8]
    prompt = int(np.argmax(first.loss_mask))
    with unspool.load(model, backend="torch") as lm:
        asked = list(lm.chat_prompt("Why?").ids)
        assert first.ids[:prompt].tolist() == asked
        answer = first.ids[prompt : int(first.offsets[1])].tolist()
        again = lm.generate(asked, max_tokens=8, temperature=0)
        assert answer == again.tokens  # the first is written without chance


def test_when_time_is_over_what_is_there_must_do(model: Path):
    loads: list[int] = []
    few = write(model, 12, loads, seconds=0.0)
    assert 1 <= few.num_documents <= 4
    assert write(model, 12, loads).num_documents > few.num_documents


def test_a_model_without_a_template_goes_on_with_beginnings(model: Path):
    settings = (model / "tokenizer_config.json").read_text()
    (model / "tokenizer_config.json").write_text(settings.replace("chat_template", "unused"))
    with pytest.raises(DataError, match="no chat template"):
        write(model, 3, [])
    found = write(model, 3, [], prefixes=[[5, 6, 7, 8], [9, 10, 11]])
    assert found.ids[:4].tolist() == [5, 6, 7, 8] and found.loss_mask is not None
    assert found.loss_mask.all() and found.num_documents == 3
