"""Bidirectional blocks, whose tokens attend to each other, in every backend and in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers import null_model, tiny
from unspool import native
from unspool.backends.step import StepBatch, TableUpdates
from unspool.engine.engine import Engine

LENGTH, BLOCK = 40, 8


def ends() -> Any:
    """The first block is causal; later tokens attend up to the end of their block."""
    positions = np.arange(LENGTH)
    return np.where(positions < BLOCK, positions + 1, (positions // BLOCK + 1) * BLOCK)


def by_transformers(name: str, tokens: list[int]) -> Any:
    """The reference: transformers with a 4D attention mask."""
    hidden = np.arange(LENGTH)[None, :] >= ends()[:, None]
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(torch.from_numpy(hidden), -1e30)
    with torch.no_grad():
        return tiny.make(name)(torch.tensor([tokens]), attention_mask=mask).logits[0].numpy()


def by_backend(backend: Any, tokens: list[int], chunks: list[int]) -> Any:
    """Block by block (a block is never split), in pages in random order."""
    pages = np.random.default_rng(0).permutation(backend.page_count)[: LENGTH // 8]
    columns = np.arange(len(pages))
    updates = TableUpdates(np.full(len(pages), 2), columns, pages)
    result, start = [], 0
    for count in chunks:
        positions = np.arange(start, start + count)
        batch = StepBatch(
            np.array(tokens[start : start + count]),
            positions,
            ends()[positions],
            np.array([0, count]),
            np.array([2]),
            table_updates=updates,
            logits_indices=np.arange(count),
        )
        result.append(np.asarray(backend.launch(batch).result().logits))
        updates, start = TableUpdates(), start + count
    return np.concatenate(result)


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("chunks", [[40], [3, 13, 24], [16, 8, 8, 8]], ids=str)
def test_blocks_are_those_of_transformers(tmp_path: Path, kind: str, chunks: list[int]):
    if kind == "native" and native.missing_reason() is not None:
        pytest.skip("no native library")
    tiny.save("llama", tmp_path)
    lm = unspool.load(tmp_path, backend=kind, memory=8 << 20)
    tokens = np.random.default_rng(3).integers(3, 250, LENGTH).tolist()
    result = by_backend(lm.engine.backend, tokens, chunks)
    expected = by_transformers("llama", tokens)
    # The native backend keeps keys and values in 16 bits.
    np.testing.assert_allclose(result, expected, atol=1e-4 if kind == "torch" else 2e-2)


def test_a_provisional_block_is_written_replaced_and_committed():
    engine = Engine(null_model.NullModel(pages=40))
    tree, after = engine.tree, null_model.logits_after
    branch = engine.open([1, 2, 3])
    engine.extend(branch)
    engine.call(lambda: tree.append(branch, [9] * 6, provisional=True))
    whole = [1, 2, 3, 9, 9, 9, 9, 9, 9]
    for _ in range(2):
        logits = engine.extend(branch, num_logits=6)
        assert all(np.array_equal(row, after(whole, 40)) for row in logits), "all see the block"
        assert engine.call(lambda: tree.open([*whole, 1]).num_reused) <= 3, "nobody finds it"
        engine.call(lambda: tree.replace(branch, 4, [7, 8]))
        whole[4:6] = [7, 8]
    engine.extend(branch)
    engine.call(lambda: tree.commit(branch))
    assert np.array_equal(engine.extend(branch, [5])[0], after([*whole, 5], 40))
    assert engine.call(lambda: tree.open([*whole, 1]).num_reused) >= 8, "now it is found"
    with pytest.raises(ValueError, match="provisional"):
        engine.call(lambda: tree.replace(branch, 4, [1]))
