"""Batches one ahead: the same ones, made while the device is busy, and never before their time."""

from types import SimpleNamespace

import pytest
import torch

from unspool.train.data.batches import TrainingBatch
from unspool.train.running.loop import BatchPrefetcher, TrainingError

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
        batch = super().batch(step)
        return TrainingBatch(batch.ids.as_subclass(Unmoved))


class Written(OnGpu):
    on_policy = True


def numbers(ahead: BatchPrefetcher, batches: Counted) -> list[tuple[int, list[int]]]:
    """Three steps as the loop does them: take one, prepare the next, and note what was made."""
    observed = []
    for index in range(3):
        ids = ahead.get(index).ids
        before = list(batches.generate)
        ahead.prefetch(index + 1)
        observed.append((int(ids[0, 0]), before))
    return observed


@pytest.mark.parametrize(
    ("batches", "device", "created"),
    [
        (OnGpu(), A_GPU, [[0], [0, 1], [0, 1, 2]]),
        (Counted(), torch.device("cpu"), [[0], [0, 1], [0, 1, 2]]),
        (Written(), A_GPU, [[0], [0, 1], [0, 1, 2]]),
    ],
)
def test_every_batch_comes_once_and_in_order(batches, device, created) -> None:
    ahead = BatchPrefetcher(batches, 10, device)
    assert numbers(ahead, batches) == list(enumerate(created))


def test_a_gpu_has_the_next_batch_ready_and_others_do_not_make_it() -> None:
    for batches, device, created in (
        (OnGpu(), A_GPU, [0, 1]),
        (Written(), A_GPU, [0]),
        (Counted(), torch.device("cpu"), [0]),
    ):
        ahead = BatchPrefetcher(batches, 10, device)  # type: ignore[arg-type]
        ahead.get(0)
        ahead.prefetch(1)
        assert batches.generate == created


def test_another_batch_than_the_prepared_one_is_made() -> None:
    batches = OnGpu()
    ahead = BatchPrefetcher(batches, 10, A_GPU)  # type: ignore[arg-type]
    ahead.prefetch(1)
    assert int(ahead.get(5).ids[0, 0]) == 5


def test_a_token_outside_the_vocabulary_is_told() -> None:
    with pytest.raises(TrainingError, match="batch 12 has token 12, but the model has 10 tokens"):
        BatchPrefetcher(Counted(), 10, torch.device("cpu")).get(12)
