"""Tiny models as GGUF files, made by llama.cpp's converter.

The converter takes seconds to start, so all models that several test modules need are converted
together, once per test run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from helpers import assets, convert_to_gguf, tiny, tiny_masked, tiny_recurrent

# Models that GGUF cannot express: the windows of Mistral and Qwen2, and others. The converter reads
# the experts of Qwen3-VL only in their original layout. Two variants of Gemma 4 are covered by a
# third.
_CAUSAL_NOT_IN_GGUF = (
    "mistral", "qwen2-window", "gemma2", "qwen3-moe", "llama-dynamic", "qwen3-vl-moe",
    "gemma4-dense", "gemma4-experts", "gpt-oss",
)  # fmt: skip
CAUSAL = [name for name in (*tiny.FAMILIES, *tiny.TODAY) if name not in _CAUSAL_NOT_IN_GGUF]
# GGUF has no setting for unnormalized expert weights, for layers without experts, and for RoPE in
# Granite hybrid.
_RECURRENT_NOT_IN_GGUF = {
    "lfm2-moe-no-bias", "qwen3-next-dense", "granite-hybrid-turned", "nemotron-h-both",
}  # fmt: skip
RECURRENT = sorted(tiny_recurrent.FAMILIES.keys() - _RECURRENT_NOT_IN_GGUF)
MASKED = ("dream", "llada")
# Models for the tests of export, with 300 rows for the small vocabulary. llama.cpp needs keys and
# values of a recurrent head to have the same width.
_SQUARE = {**tiny_recurrent._DELTA, "linear_value_head_dim": 12}
_SHARED = {**_SQUARE, **tiny_recurrent._EXPERTS, "shared_expert_intermediate_size": 24}
EXPORTED_RECURRENT: dict[str, Callable[[], Any]] = {
    "lfm2": tiny_recurrent.FAMILIES["lfm2"],
    "lfm2-moe": tiny_recurrent.FAMILIES["lfm2-moe"],
    "qwen3.5": tiny.named("Qwen3_5", **_SQUARE),
    "qwen3.5-moe": tiny.named("Qwen3_5Moe", **_SHARED),
    "qwen3-next": tiny.named("Qwen3Next", **_SHARED),
}
EXPORTED_CAUSAL = (
    "llama", "llama-tied-bias", "llama-linear", "llama-llama3", "llama-yarn", "qwen2", "qwen3",
)  # fmt: skip


def save_for_export(name: str, folder: Path) -> Any:
    """Save a model of 300 rows; returns the transformers model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny._SHAPE, "vocab_size", 300)
        torch.manual_seed(0)
        model = tiny.filled({**tiny.FAMILIES, **EXPORTED_RECURRENT}[name]())
    model.save_pretrained(folder)
    return model


def convert(pairs: Iterable[tuple[Path, Path]], *, vocabulary: bool = False) -> None:
    """Convert folders saved by transformers (source, target) in one process.

    Args:
        vocabulary: Add a dummy vocabulary, so that llama.cpp opens the files.
    """
    _run([("vocabulary" if vocabulary else "plain", *pair) for pair in pairs])


def converted_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with NAME and NAME.gguf of all models; those of `RECURRENT` have a vocabulary.

    `exported` in it has those that are exported by Unspool too.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # shared by all workers
    folder = root / "converted-to-gguf"
    with FileLock(root / "converted-to-gguf.lock"):
        if not (folder / "done").exists():
            for name in (*CAUSAL, *RECURRENT):
                tiny.save(name, folder / name)
            for name in MASKED:
                tiny_masked.save(name, folder / name)
            exported = [f"exported/{name}" for name in (*EXPORTED_CAUSAL, *EXPORTED_RECURRENT)]
            for name in exported:
                save_for_export(name.removeprefix("exported/"), folder / name)
            _run(
                (
                    "vocabulary" if name in RECURRENT else "plain",
                    folder / name,
                    folder / f"{name}.gguf",
                )
                for name in (*CAUSAL, *RECURRENT, *MASKED, *exported)
            )
            (folder / "done").touch()
    return folder


def _run(jobs: Iterable[tuple[str, Path, Path]]) -> None:
    """In a forked process, where possible: importing torch takes longer than all conversions."""
    arguments = [str(argument) for job in jobs for argument in job]
    context: Any = get_context("fork" if sys.platform == "linux" else "spawn")
    process = context.Process(
        target=convert_to_gguf.main, args=(str(assets.llama_cpp_source()), *arguments)
    )
    process.start()
    process.join()
    assert process.exitcode == 0, "llama.cpp's converter failed"
