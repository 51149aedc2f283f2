"""The memory of recurrent states is known before a model is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from helpers.paged_texts import config
from unspool.model.config import Recurrence
from unspool.model.files import gguf
from unspool.model.hub.inspect import summarize_model
from unspool.model.hub.memory import PLANNED_STATES, sequence_memory

QWEN = {
    "block_count": 24, "embedding_length": 1024, "context_length": 262144,
    "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 256,
    "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 128,
    "ssm.group_count": 16, "ssm.time_step_rank": 16, "ssm.inner_size": 2048,
}  # fmt: skip


def test_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The numbers of Qwen3.5-0.8B."""

    class Header:
        def __init__(self, path: Any, glance: bool) -> None:
            self.metadata = {f"qwen35.{key}": value for key, value in QWEN.items()}
            self.metadata |= {"general.architecture": "qwen35", "general.file_type": 15}

    monkeypatch.setattr(gguf, "GGUFFile", Header)
    monkeypatch.setattr(gguf, "part_paths", lambda path: [path])
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    observed = summarize_model(tmp_path / "model.gguf")
    shape = Recurrence(conv_kernel=4, key_heads=16, value_heads=16, key_width=128, value_width=128)
    mixers = ("delta", "delta", "delta", "attention") * 6
    complete = config(
        layers=24, width=1024, heads=8, kv_heads=2, head_width=256, mixers=mixers, recurrence=shape
    )
    assert not observed.problem
    assert (
        observed.state_bytes == complete.state_bytes
        and observed.kv_bytes == 2 * complete.kv_floats_per_token
    )
    assert 18 << 20 < observed.state_bytes < 20 << 20


def test_of_a_folder(tmp_path: Path):
    tiny.save("qwen3.5", tmp_path)
    observed = summarize_model(tmp_path)
    assert not observed.problem and observed.state_bytes > 0
    text = sequence_memory(observed.kv_bytes, observed.context)
    with_states = sequence_memory(observed.kv_bytes, observed.context, observed.state_bytes)
    assert with_states == text + PLANNED_STATES * observed.state_bytes
