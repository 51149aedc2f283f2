"""The pool of pages, and chunks of prompts: as large as there is room for."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers import tiny  # noqa: E402
from unspool.backends.cuda import backend as cuda_backend  # noqa: E402
from unspool.backends.cuda import kv_cache  # noqa: E402
from unspool.backends.cuda.kv_cache import KVCache, page_bytes  # noqa: E402
from unspool.backends.cuda.load import load_weights  # noqa: E402
from unspool.errors import SettingsError, UnspoolError, UnspoolWarning  # noqa: E402
from unspool.model.files.checkpoint import open_checkpoint  # noqa: E402


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save("llama", folder)
    return load_weights(open_checkpoint(folder), dtype=torch.float32, device=torch.device("cpu"))


def room_for(monkeypatch, most: int) -> list[int]:
    """Fake a device with memory for `most` pages; return the requested counts."""
    counts = []

    def make(config, count, states, dtype, device):
        counts.append(count)
        if count > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return KVCache(config, count, states, dtype, device)

    monkeypatch.setattr(kv_cache, "KVCache", make)
    return counts


def test_so_much_as_is_said(weights):
    bytes_per_page = page_bytes(weights.config, weights.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kv_cache.allocate_kv_cache(weights, 100 * bytes_per_page + 5, 128).count == 100
    with pytest.raises(SettingsError, match="at least one KV cache page"):
        kv_cache.allocate_kv_cache(weights, bytes_per_page - 1, 128)


def test_not_more_than_texts_can_use(weights):
    assert kv_cache.allocate_kv_cache(weights, None, 32).count == 512 * 2


def test_a_smaller_pool_where_memory_is_out(weights, monkeypatch):
    counts = room_for(monkeypatch, 60)
    bytes_per_page = page_bytes(weights.config, weights.dtype)
    with pytest.warns(UnspoolWarning, match=r"no memory for a KV cache of .*; using"):
        pages = kv_cache.allocate_kv_cache(weights, 100 * bytes_per_page, 128)
    assert pages.count == 56 and counts == [100, 75, 56]


def test_no_room_at_all_is_said_in_words(weights, monkeypatch):
    room_for(monkeypatch, 3)
    with pytest.raises(UnspoolError, match="the KV cache does not fit beside the weights"):
        kv_cache.allocate_kv_cache(weights, None, 128)


@pytest.mark.parametrize(
    ("billions", "capability", "free", "expected"),
    [
        (8, (9, 0), 24 << 30, 16_384),
        (8, (9, 0), 4 << 30, 8192),  # too little memory
        (32, (9, 0), 24 << 30, 8192),  # takes longer than half a second
        (8, (8, 9), 24 << 30, 8192),  # so does a smaller GPU
        (1, (8, 9), 24 << 30, 16_384),
    ],
)
def test_a_prompt_alone_has_longer_chunks_where_time_and_memory_allow(
    billions: int, capability: tuple[int, int], free: int, expected: int, monkeypatch: Any
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(cuda_backend, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(cuda_backend, "activation_bytes", lambda weights: 156_000)
    matrix = SimpleNamespace(rows=billions * 1000, columns=1_000_000)
    weights: Any = SimpleNamespace(device=torch.device("cuda"), matrices=lambda: [matrix])
    assert cuda_backend._prefill_alone(weights) == expected
