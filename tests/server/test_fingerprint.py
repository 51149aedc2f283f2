"""`system_fingerprint` changes with everything that may change a text, and with nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unspool
from helpers.cuda_support import cuda_model
from helpers.word_model import save_chatty
from unspool import native
from unspool.model.files.checkpoint import open_checkpoint
from unspool.server.runtime import registry
from unspool.server.runtime.registry import system_fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fingerprint")
    save_chatty(folder)
    return folder


def fingerprint_of(folder: Path, **options: Any) -> str:
    options = {"backend": "native", "memory": 8 << 20, **options}
    with unspool.load(folder, **options) as lm:
        return system_fingerprint(lm)


@pytest.fixture(scope="module")
def usual(folder: Path) -> str:
    return fingerprint_of(folder)


def test_threads_and_memory_do_not_count(folder: Path, usual: str):
    assert fingerprint_of(folder, threads=1, memory=16 << 20) == usual


@pytest.mark.parametrize(
    "options",
    [
        {"kv_bits": 8},
        {"kv_bits": 32},
        {"quantize": 8},
        {"quantize": 4},
        {"dtype": "bfloat16"},
        {"backend": "torch"},
        {"context": 32},
    ],
    ids=str,
)
def test_options_of_loading_count(folder: Path, usual: str, options: dict[str, Any]):
    assert fingerprint_of(folder, **options) != usual


def test_instruction_set_and_version_count(
    folder: Path, usual: str, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(native, "instruction_set", lambda: "another")
        assert fingerprint_of(folder) != usual
    monkeypatch.setattr(registry, "__version__", "0.0.0")
    assert fingerprint_of(folder) != usual


def test_weights_and_template_count(folder: Path, usual: str, tmp_path: Path):
    save_chatty(tmp_path / "weights", seed=1)
    assert fingerprint_of(tmp_path / "weights") != usual
    with unspool.load(folder, memory=8 << 20) as lm:
        lm.tokenizer.chat_template = "{{ messages }}"
        assert system_fingerprint(lm) != usual


def test_exact_counts_on_a_gpu(folder: Path, usual: str):
    """Without a GPU the CUDA model is on the CPU, for Triton's interpreter."""
    checkpoint = open_checkpoint(folder)
    with unspool.load(folder, memory=8 << 20) as lm:
        results = [
            system_fingerprint(_session_with(lm, cuda_model(checkpoint, exact=exact)))
            for exact in (False, True)
        ]
    assert len({*results, usual}) == 3


def _session_with(lm: Any, model: Any) -> Any:
    names = ("tokenizer", "config", "context")
    return SimpleNamespace(model=model, **{name: getattr(lm, name) for name in names})
