"""Saved KV-cache pages and states: the text continues with the same bits; no file is trusted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.recurrent_texts import SHAPES, checkpoint
from unspool.backends.cpu.model import CpuModel
from unspool.engine.engine import Engine
from unspool.engine.page_files import CHUNK, PageFiles, StoredPages, read_tokens, remove_unfinished
from unspool.engine.request import Limits, Request
from unspool.model.adapters import Adapter, LowRank, adaptable_shapes
from unspool.model.files.checkpoint import load_transformer
from unspool.sampling import SamplingSettings

LENGTH = CHUNK + 90
LIMIT = 1 << 40


PLAIN = {"mixers": ("attention",) * 3, "recurrence": None}
MODELS: dict[str, dict[str, Any]] = {"attention": PLAIN, **{name: {} for name in SHAPES}}


def engine_of(name: str, memory: int = 32 << 20, backend: str = "cpu") -> Engine:
    shape = checkpoint("conv" if name == "attention" else name, **MODELS[name])
    if backend == "torch":
        from unspool.backends.torch.backend import TorchModel

        return Engine(TorchModel(load_transformer(shape)).backend(memory=memory, context=1024))
    model = CpuModel(shape, store=None, threads=2, kv_bits=16)
    return Engine(model.backend(memory=memory, context=1024))


def some_text(engine: Engine, length: int = LENGTH, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(1, engine.backend.vocab_size, length)]


def compute(
    engine: Engine, tokens: list[int], count: int = 6, adapter: str | None = None
) -> tuple[list[int], int]:
    """Continue a text greedily; return the new tokens and how many old ones were cached."""
    request = Request(
        prompt=tuple(tokens),
        settings=SamplingSettings(temperature=0.0),
        limits=Limits(max_tokens=count, context=1024),
        adapter=adapter,
    )
    stream = engine.submit(request)
    return [step.token for step in stream], stream.prompt_reused


def logits_of(engine: Engine, tokens: list[int]) -> Any:
    branch = engine.open(tokens)
    try:
        return np.asarray(engine.extend(branch)).copy()
    finally:
        engine.release(branch)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "cpu") for name in MODELS), ("attention", "torch"), ("delta", "torch")],
)
def test_a_text_goes_on_with_the_same_bits(name: str, backend: str, tmp_path: Path):
    first = engine_of(name, backend=backend)
    tokens = some_text(first)
    expected, _ = compute(first, tokens)
    files = PageFiles(tmp_path, name, LIMIT)
    files.save(first, [*tokens, *expected])
    goes_on, _ = compute(first, [*tokens, *expected])
    logits = logits_of(first, tokens)
    first.close()
    second = engine_of(name, backend=backend)
    second.page_files = PageFiles(tmp_path, name, LIMIT)
    num_free = second.tree.pool.free
    assert second.page_files.restore_latest(second) == LENGTH + len(expected) - 1
    assert second.tree.pool.free == num_free - -(-(LENGTH + len(expected) - 1) // 16)
    written, reused = compute(second, [*tokens, *expected])
    assert reused == LENGTH + len(expected) - 1
    if backend == "torch":  # its last digits depend on how many tokens a step has
        assert np.allclose(logits_of(second, tokens), logits, atol=1e-3)
    else:
        assert written == goes_on and np.array_equal(logits_of(second, tokens), logits)
    second.close()
    third = engine_of(
        name, backend=backend
    )  # a text that parts from it: as far as both are the same
    third.page_files = PageFiles(tmp_path, name, LIMIT)
    other = [*tokens[: CHUNK + 40], *some_text(third, 20, seed=1)]
    written, reused = compute(third, other)
    plain = engine_of(name, backend=backend)
    assert backend == "torch" or written == compute(plain, other)[0]
    assert reused == CHUNK + 40 or plain.backend.state_bytes
    third.close()
    plain.close()


def adapter_of(engine: Engine, seed: int) -> Adapter:
    """An adapter of the attention layers with random weights."""
    rng = np.random.default_rng(seed)
    backend: Any = engine.backend
    shapes = adaptable_shapes(backend.model.config)
    parts = {
        name: LowRank(
            rng.standard_normal((3, columns)).astype(np.float32),
            rng.standard_normal((rows, 3)).astype(np.float32),
            0.1,
        )
        for name, (rows, columns) in shapes.items()
        if name.endswith((".attention.q.weight", ".attention.v.weight"))
    }
    assert parts
    return Adapter(parts)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_pages_of_an_adapter_are_for_the_same_adapter_only(backend: str, tmp_path: Path):
    first = engine_of("attention", backend=backend)
    first.adapters.load("poet", adapter_of(first, 1))
    tokens = some_text(first)
    expected, _ = compute(first, tokens, adapter="poet")
    files = PageFiles(tmp_path, "m", LIMIT)
    assert files.save(first, tokens, first.adapters.number("poet")) == LENGTH - 1
    branch = first.open(tokens, "poet")
    first.save(branch, tmp_path / "branch.kv")
    assert read_tokens(tmp_path / "branch.kv") == (tokens, "poet")
    first.release(branch)
    first.close()
    second = engine_of("attention", backend=backend)
    second.page_files = PageFiles(tmp_path, "m", LIMIT)
    assert second.page_files.restore_latest(second) == 0  # it is the text of an adapter
    second.adapters.load("other", adapter_of(second, 2))
    second.adapters.load("poet", adapter_of(second, 1))  # it has another number here
    assert compute(second, tokens)[1] == 0
    other, reused = compute(second, tokens, adapter="other")
    assert reused == 0
    assert compute(second, tokens, adapter="poet") == (expected, LENGTH - 1)
    second.adapters.load("poet", adapter_of(second, 2))  # the same name, other weights
    assert compute(second, tokens, adapter="poet")[0] == other
    second.close()


def test_texts_share_files_and_grow(tmp_path: Path):
    engine = engine_of("attention")
    files = PageFiles(tmp_path, "m", LIMIT)
    tokens = some_text(engine, 3 * CHUNK)
    for length in (100, 300, 3 * CHUNK - 10):
        compute(engine, tokens[:length], 1)
        files.save(engine, tokens[:length])
        saved = sorted(int(path.name.split("-")[1]) for path in files.folder.iterdir())
        assert sum(saved) == length - 1 and len(saved) == -(-length // CHUNK)
    before = {path.name: path.stat().st_ino for path in files.folder.iterdir()}
    files.save(engine, tokens[: 3 * CHUNK - 10])
    assert {path.name: path.stat().st_ino for path in files.folder.iterdir()} == before
    engine.close()


@pytest.mark.parametrize("damage", ["bit", "short", "long", "empty", "header", "model", "tokens"])
def test_a_damaged_or_foreign_file_is_removed_and_the_text_computed_again(
    damage: str, tmp_path: Path
):
    name = "attention"
    first = engine_of(name)
    tokens = some_text(first)
    expected, _ = compute(first, tokens)
    PageFiles(tmp_path, "m", LIMIT).save(first, tokens)
    first.close()
    files = sorted(tmp_path.rglob("*.kv"))
    for path in files:
        content = bytearray(path.read_bytes())
        if damage == "bit":
            content[-300] ^= 4
        elif damage == "header":
            content[40] ^= 4
        elif damage == "tokens":  # of the header: pages must not be used for another text
            content[content.index(b'"tokens":[') + 10] ^= 1
        elif damage == "model":
            content = bytearray(bytes(content).replace(b'"identity":"m"', b'"identity":"n"'))
        data = {"short": content[:-1], "long": content + b"x", "empty": b""}.get(damage, content)
        path.write_bytes(data)
    second = engine_of(name)
    second.page_files = PageFiles(tmp_path, "m", LIMIT)
    written, reused = compute(second, tokens)
    assert written == expected and reused == 0
    assert not files[0].exists() or not files[1].exists()
    second.close()


def test_files_are_evicted_by_size_and_a_small_cache_takes_what_fits(tmp_path: Path):
    name = "attention"
    engine = engine_of(name)
    tokens = some_text(engine, 2 * CHUNK)
    compute(engine, tokens, 1)
    files = PageFiles(tmp_path, "m", LIMIT)
    files.save(engine, tokens)
    size = max(path.stat().st_size for path in files.folder.iterdir())
    small = PageFiles(tmp_path / "small", "m", size)
    small.save(engine, tokens)
    assert sum(path.stat().st_size for path in small.folder.iterdir()) <= size
    expected, _ = compute(engine, tokens)
    engine.close()
    tight = engine_of(name, memory=40 * engine.backend.page_bytes)
    tight.page_files = files
    other = tight.open(some_text(tight, 10, seed=3))
    assert compute(tight, tokens)[0] == expected
    tight.release(other)
    tight.close()


def test_the_start_of_a_text_is_evicted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = engine_of("attention")
    old, new = some_text(engine, 3 * CHUNK), some_text(engine, 2 * CHUNK, seed=1)
    compute(engine, old, 1)
    compute(engine, new, 1)
    files = PageFiles(tmp_path, "m", LIMIT)
    files.save(engine, old)
    size = max(path.stat().st_size for path in files.folder.iterdir())
    for path in files.folder.iterdir():  # long ago
        os.utime(path, ns=(10**18, 10**18))
    few = PageFiles(tmp_path, "m", 4 * size)
    few.save(engine, old[: 3 * CHUNK - 1])  # used again: as it is stored already, nothing changes
    few.save(engine, new)
    engine.close()
    other = engine_of("attention")
    assert PageFiles(tmp_path, "m", LIMIT).restore(other, new) == 2 * CHUNK - 1
    assert PageFiles(tmp_path, "m", LIMIT).restore(other, old) == 2 * CHUNK
    # A full disk: room for the texts themselves is more important.
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert few.save(other, old) == 0 and not [*few.folder.iterdir()]
    (few.folder / ".a.kv.1.2.part").touch()  # of a process that was killed
    remove_unfinished(tmp_path)
    assert not [*few.folder.iterdir()]
    other.close()


def test_saved_pages_are_read_again_from_a_file(tmp_path: Path):
    engine = engine_of("delta")
    access: Any = engine.backend
    pages = np.arange(2 * access.page_bytes, dtype=np.uint8).reshape(2, -1)
    stored = StoredPages(list(range(20)), pages, {20: np.ones(access.state_bytes, np.uint8)})
    stored.write(tmp_path / "a.kv", "m")
    again = StoredPages.read(tmp_path / "a.kv", "m", access)
    assert again is not None and again.tokens == stored.tokens
    assert np.array_equal(again.pages, pages) and list(again.states) == [20]
    engine.close()
