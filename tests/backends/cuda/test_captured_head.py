"""A drafting head as graphs: same guesses as in plain torch, also with other drafts in between.

By Triton's interpreter on the CPU, which is slow; tests/gpu has the same on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.cuda_support import cuda_model, language_model
from helpers.heads_support import PROMPT, save_own
from helpers.paged_texts import RandomCheckpoint, config
from unspool.decoding.speculative import head_cuda
from unspool.decoding.speculative.head import DraftShape, UnspoolHead, build_draft, read_head
from unspool.decoding.speculative.head_drafter import load_head

pytest.importorskip("triton")

TINY = config(layers=2, context=256, vocab_size=259)
READS = {"layers": (0, 1, 2)}
TEXT = (PROMPT * 8)[:130]


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


@pytest.fixture(scope="module")
def lm(device: str) -> Any:
    with language_model(cuda_model(RandomCheckpoint(TINY), device=device)) as lm:
        yield lm


@pytest.fixture(scope="module")
def head_folder(lm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    save_own(folder, lm, **READS)
    return folder


def load_heads(lm: Any, head_folder: Path) -> list[Any]:
    quick = load_head(head_folder, lm)
    assert isinstance(quick, head_cuda.CudaHead)
    return [quick, UnspoolHead(read_head(head_folder), lm.model, lm.model.device)]


def vectors(head: Any, count: int) -> Any:
    """What the model might have inside; a head reads anything."""
    shape = (len(head.layers), len(TEXT), head.config.width)
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)[:, :count]


def read(head: Any, text: list[int]) -> Any:
    context, count = head.context(), len(text) - 1
    context.read(np.arange(count), vectors(head, count), text[1:])
    return context


def guesses(context: Any, tokens: list[int], ids: Any, most: int = 1) -> list[list[int]]:
    """A chain, and a tree."""
    tree: Any = build_draft(context, tokens, ids, DraftShape(9, width=3, depth=3), 0.7)
    return [build_draft(context, tokens, ids, DraftShape(most), 0.7), [*tree.tokens, *tree.parents]]  # type: ignore[list-item]


def test_what_it_guesses(lm: Any, head_folder: Path):
    heads = load_heads(lm, head_folder)
    quick, slow = (read(head, TEXT[:90]) for head in heads)
    actual, expected = (guesses(context, TEXT[:90], heads[0].ids, 3) for context in (quick, slow))
    assert actual == expected
    guess_list = list(quick.chain(TEXT[:90], 1, 0.7))
    logits = slow.expand([head_cuda.DraftNode(TEXT[89])], TEXT[:90])[0].astype(np.float64) / 0.7
    chances = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert guess_list[0][0] == heads[1].ids[chances.argmax()]
    assert guess_list[0][1] == pytest.approx(chances.max(), abs=1e-3)


def test_pinned_memory_is_not_written_before_it_was_read() -> None:
    """On a GPU an event is recorded after the copy; here a fake event that only counts."""

    class Event:
        recorded = synchronized = 0

        def record(self) -> None:
            self.recorded += 1

        def synchronize(self) -> None:
            self.synchronized += 1

    pinned = head_cuda.PinnedInput(4, torch.device("cpu"))
    pinned._copy_done = event = Event()  # type: ignore[assignment]
    for number in range(3):
        pinned.writable()[:] = number
        assert (event.synchronized, event.recorded) == (number + 1, number)
        pinned.send()
        assert event.recorded == number + 1 and pinned.device_tensor.tolist() == [number] * 4
