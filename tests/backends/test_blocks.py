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
    full = [1, 2, 3, 9, 9, 9, 9, 9, 9]
    for _ in range(2):
        logits = engine.extend(branch, num_logits=6)
        assert all(np.array_equal(row, after(full, 40)) for row in logits), "all see the block"
        assert engine.call(lambda: tree.open([*full, 1]).num_reused) <= 3, "nobody finds it"
        engine.call(lambda: tree.replace(branch, 4, [7, 8]))
        full[4:6] = [7, 8]
    engine.extend(branch)
    engine.call(lambda: tree.commit(branch))
    assert np.array_equal(engine.extend(branch, [5])[0], after([*full, 5], 40))
    assert engine.call(lambda: tree.open([*full, 1]).num_reused) >= 8, "now it is found"
    with pytest.raises(ValueError, match="provisional"):
        engine.call(lambda: tree.replace(branch, 4, [1]))


# -- Hooks on `lm.transformer` --------------------------------------------------------------------


TOKENS = [int(token) for token in np.random.default_rng(2).integers(3, 250, 45)]


def load(name: str, folder: Path) -> Any:
    tiny.save(name, folder)
    return unspool.load(folder, backend="torch", memory=8 << 20)


def read(lm: Any, tokens: list[int]) -> Any:
    """The logits after the tokens, and how many tokens were cached."""
    with lm.open_branch(tokens) as branch:
        return np.array(lm.engine.extend(branch)), branch.num_reused


def steer(module: torch.nn.Module) -> Any:
    def add(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1

    return module.register_forward_hook(add)


@pytest.mark.parametrize("name", ["llama", "gemma4-all", "qwen3.5"])
def test_hooks_on_every_module_run(name: str, tmp_path: Path):
    before: set[str] = set()
    after: set[str] = set()
    with load(name, tmp_path) as lm:
        expected = {
            path
            for path, module in lm.transformer.named_modules()
            if not isinstance(module, torch.nn.ModuleList)
        }
        for path, module in lm.transformer.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: before.add(path))
            module.register_forward_hook(lambda *_, path=path: after.add(path))
        lm.generate(TOKENS, max_tokens=2)
    assert before == after == expected


def test_removing_a_hook_removes_its_changes(tmp_path: Path):
    with load("llama", tmp_path) as lm:
        plain, _ = read(lm, TOKENS)
        _, reused = read(lm, TOKENS)
        assert reused == len(TOKENS) - 1
        for module in (lm.transformer.layers[1], lm.transformer.layers[0].attention):
            hook = steer(module)
            for _ in range(2):
                steered, reused = read(lm, TOKENS)
                assert reused == 0 and not np.allclose(steered, plain)
            longer, _ = read(lm, [*TOKENS, 7, 8, 9])
            hook.remove()
            again, reused = read(lm, TOKENS)
            assert reused == len(TOKENS) - 1 and np.allclose(again, plain, atol=1e-4)
            result, _ = read(lm, [*TOKENS, 7, 8, 9])
            assert not np.allclose(result, longer)
        fresh = unspool.load(tmp_path, backend="torch", memory=8 << 20)
        with fresh:
            assert np.allclose(read(fresh, [*TOKENS, 7, 8, 9])[0], result, atol=1e-4)


def test_sequences_started_before_and_after_a_hook(tmp_path: Path):
    """A sequence started without hooks never shares changed pages, and changed pages are never
    cached for others."""
    with load("llama", tmp_path) as lm:
        engine = lm.engine
        started = engine.open(TOKENS)
        engine.extend(started)
        stored_values = engine.fork(started)
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, output: output + 1 if module is lm.transformer.layers[0] else None
        )
        engine.extend(started, list(range(40, 60)))  # over the border of a page
        other = engine.fork(started)
        hook.remove()
        engine.extend(started, [3, 4])
        engine.extend(other, [5, 6])
        plain = np.array(engine.extend(stored_values, list(range(40, 60))))
        for branch in (started, other):
            engine.release(branch)
        again, reused = read(lm, [*TOKENS, *range(40, 60)])
        assert reused == len(TOKENS) + 19 and np.allclose(again, plain, atol=1e-4)
        engine.release(stored_values)
    with unspool.load(tmp_path, backend="torch", memory=8 << 20) as fresh:
        expected, _ = read(fresh, [*TOKENS, *range(40, 60)])
    assert np.allclose(plain, expected, atol=1e-4)


def test_pages_of_changed_texts_are_freed(tmp_path: Path):
    """They can be evicted like others, without leaks."""
    with load("llama", tmp_path) as lm:
        hook = steer(lm.transformer.layers[2])
        for start in range(3):
            read(lm, TOKENS[start:])
        hook.remove()
        tree = lm.engine.tree
        lm.engine.call(tree.index.clear)
        assert tree.index.pages == 0 and tree.pool.free == tree.pool.count
        assert not tree.index.root().children
