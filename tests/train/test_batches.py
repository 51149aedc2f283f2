"""Batches: a pure function of the step, every row once an epoch, no overlap between ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unspool.errors import DataError, SettingsError
from unspool.train.data.batches import PackedBatches, TrainingBatch
from unspool.train.data.prepared import PackedDocuments
from unspool.train.data.selection import permuted
from unspool.train.running.loop import BatchPrefetcher, TrainingError


def text(tokens: int, *borders: int) -> PackedDocuments:
    """Ids that say where they stand."""
    return PackedDocuments(
        np.arange(tokens, dtype=np.uint32), np.array([0, *borders, tokens]), None
    )


def windows(batches: PackedBatches, steps: range) -> list[int]:
    return [int(row[0]) // batches.length for step in steps for row in batches.batch(step).ids]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_the_shuffle_is_a_permutation(count: int) -> None:
    places = np.arange(count)
    result = permuted(places, count, "key")
    assert sorted(result) == list(places)
    assert (permuted(places, count, "key") == result).all()
    assert (permuted(places[::-1], count, "key") == result[::-1]).all()  # each place by itself
    if count > 60:
        assert (permuted(places, count, "other") != result).mean() > 0.9
        distance = np.abs(np.diff(result)).mean()  # of neighbours; a third of all by chance
        assert 0.2 < distance / count < 0.47


def test_the_shuffle_stays_what_it_is() -> None:
    """A run resumed with a newer version must see the same rows."""
    assert permuted(np.arange(10), 10, "0 0").tolist() == [4, 2, 5, 8, 6, 0, 3, 1, 7, 9]


def test_windows_hold_every_token_as_a_target_once() -> None:
    batches = PackedBatches(text(101), batch_size=2, length=10)
    assert batches.rows == 10
    observed = [batches.batch(step) for step in range(5)]
    targets = torch.cat([batch.targets for batch in observed]).flatten()
    assert sorted(targets.tolist()) == list(range(1, 101))
    for batch in observed:
        assert batch.ids.shape == (2, 11) and batch.ids.dtype == torch.int64
        assert (batch.targets == batch.inputs + 1).all()
        assert batch.loss_mask is None and batch.document_ids is None


def test_each_epoch_sees_every_window_in_another_order() -> None:
    batches = PackedBatches(text(513), batch_size=4, length=8, seed=3)
    first, second = windows(batches, range(16)), windows(batches, range(16, 32))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second and first != sorted(first)
    assert windows(PackedBatches(text(513), 4, 8, seed=4), range(16)) != first
    observed = windows(PackedBatches(text(57), 5, 8), range(7))  # epochs end within a batch
    for epoch in range(5):
        assert sorted(observed[epoch * 7 : epoch * 7 + 7]) == list(range(7))


def test_ranks_share_what_one_would_see() -> None:
    packed = text(1000)
    alone = PackedBatches(packed, 6, 16, seed=1)
    ranks = [PackedBatches(packed, 2, 16, seed=1, rank=rank, world=3) for rank in range(3)]
    for step in (*range(30), 5, 1_000_000):  # a batch depends on its step alone
        together = torch.cat([item.batch(step).ids for item in ranks])
        assert torch.equal(together, alone.batch(step).ids)


def test_documents_in_a_window() -> None:
    batches = PackedBatches(text(21, 4, 5, 17), 1, 10, inside_documents=True)
    by_window = {int(b.ids[0, 0]): b.document_ids for b in map(batches.batch, range(2))}
    assert by_window[0].tolist() == [[0, 0, 0, 0, 1, 2, 2, 2, 2, 2]]
    assert by_window[10].tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 1, 1]]
    assert by_window[0].dtype == torch.int32


def chat(*documents: tuple[int, list[int]]) -> PackedDocuments:
    """Documents by their length and the places in them that count."""
    lengths = [length for length, _ in documents]
    borders = np.concatenate([[0], np.cumsum(lengths)])
    loss_mask = np.zeros(borders[-1], bool)
    for begin, (_, places) in zip(borders, documents, strict=False):
        loss_mask[begin + np.array(places, int)] = True
    return PackedDocuments(np.arange(1, borders[-1] + 1, dtype=np.uint16), borders, loss_mask)


def rows(batches: PackedBatches) -> dict[int, Any]:
    result = {}
    for step in range(batches.rows):
        batch = batches.batch(step)
        result[int(batch.ids[0, 0])] = batch
    return result


def test_conversations_have_rows_of_their_own() -> None:
    batches = PackedBatches(chat((5, [3, 4]), (40, [39]), (3, [1])), 1, 100, inside_documents=True)
    result = rows(batches)
    assert sorted(result) == [1, 6, 46]
    short = result[1]
    assert short.ids.shape == (1, 33)  # filled up to a multiple of 32
    assert short.ids[0, :6].tolist() == [1, 2, 3, 4, 5, 0] and not short.ids[0, 5:].any()
    assert short.loss_mask[0].nonzero().flatten().tolist() == [2, 3]  # as targets, one earlier
    assert short.document_ids[0, :6].tolist() == [0, 0, 0, 0, 0, -1]
    assert result[6].ids.shape == (1, 65) and result[6].loss_mask[0].nonzero().tolist() == [[38]]


def test_a_long_conversation_takes_several_rows() -> None:
    batches = PackedBatches(chat((25, [0, 12, 24]), (4, [0]), (1, [0])), 1, 10)
    result = rows(batches)
    # A row without a target that counts is left out; a document's first token is never one.
    assert sorted(result) == [11, 21]
    targets = [int(t) for b in result.values() for t in b.targets[b.loss_mask]]
    assert sorted(targets) == [13, 25]


def test_what_cannot_be() -> None:
    with pytest.raises(DataError, match="5 tokens, too few for one row of 8"):
        PackedBatches(text(5), 1, 8)
    with pytest.raises(DataError, match="too few"):
        PackedBatches(chat((4, [0])), 1, 8)
    with pytest.raises(SettingsError, match="rank 2, world 2"):
        PackedBatches(text(100), 1, 8, rank=2, world=2)


def test_a_memory_map_is_read_where_it_is_needed(tmp_path: Path) -> None:
    """A batch from a file much larger than it costs no more than its rows."""
    np.arange(5_000_000, dtype=np.uint16).tofile(tmp_path / "ids")
    mapped = np.memmap(tmp_path / "ids", np.uint16, "r")
    batches = PackedBatches(PackedDocuments(mapped, np.array([0, len(mapped)]), None), 4, 64)
    import tracemalloc

    batches.batch(0)
    tracemalloc.start()
    batches.batch(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# -- Batches one ahead ----------------------------------------------------------------------------


A_GPU = SimpleNamespace(type="cuda")  # what decides whether it pays to be ahead


class Counted:
    """Batches of their own number, and the order in which they were made."""

    def __init__(self) -> None:
        self.generate: list[int] = []

    def batch(self, step: int) -> TrainingBatch:
        self.generate.append(step)
        return TrainingBatch(torch.full((1, 3), step))


class Unmoved(torch.Tensor):
    """A tensor that ignores `to`."""

    def to(self, *arguments, **extra):  # type: ignore[no-untyped-def]
        return self


class OnGpu(Counted):
    def batch(self, step: int) -> TrainingBatch:
        return TrainingBatch(super().batch(step).ids.as_subclass(Unmoved))


class Written(OnGpu):
    on_policy = True


@pytest.mark.parametrize(
    ("batches", "device", "num_ahead"),
    [(OnGpu(), A_GPU, 1), (Written(), A_GPU, 0), (Counted(), torch.device("cpu"), 0)],
)
def test_only_a_gpu_has_the_next_batch_ready(batches: Any, device: Any, num_ahead: int) -> None:
    """Three steps as the loop does them; every batch comes once and in order."""
    ahead = BatchPrefetcher(batches, 10, device)
    for step in range(3):
        assert int(ahead.get(step).ids[0, 0]) == step
        ahead.prefetch(step + 1)
        assert batches.generate == list(range(step + 1 + num_ahead))


def test_another_batch_than_the_prepared_one_is_made() -> None:
    batches = OnGpu()
    ahead = BatchPrefetcher(batches, 10, A_GPU)  # type: ignore[arg-type]
    ahead.prefetch(1)
    assert int(ahead.get(5).ids[0, 0]) == 5


def test_a_token_outside_the_vocabulary_is_told() -> None:
    with pytest.raises(TrainingError, match="batch 12 has token 12, but the model has 10 tokens"):
        BatchPrefetcher(Counted(), 10, torch.device("cpu")).get(12)
