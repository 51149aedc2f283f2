"""Tiny models as GGUF files, made by llama.cpp's converter.

The converter takes seconds to start, so all models that several test modules need are converted
together, once per test run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from filelock import FileLock

from helpers import assets, tiny, tiny_masked, tiny_recurrent

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


def convert(pairs: Iterable[tuple[Path, Path]], *, vocabulary: bool = False) -> None:
    """Convert folders saved by transformers (source, target) in one process.

    Args:
        vocabulary: Add a dummy vocabulary, so that llama.cpp opens the files.
    """
    _run([("vocabulary" if vocabulary else "plain", *pair) for pair in pairs])


def converted_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with NAME and NAME.gguf of all models; those of `RECURRENT` have a vocabulary."""
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
            _run(
                (
                    "vocabulary" if name in RECURRENT else "plain",
                    folder / name,
                    folder / f"{name}.gguf",
                )
                for name in (*CAUSAL, *RECURRENT, *MASKED)
            )
            (folder / "done").touch()
    return folder


def _run(jobs: Iterable[tuple[str, Path, Path]]) -> None:
    script = Path(__file__).with_name("convert_to_gguf.py")
    arguments = [str(argument) for job in jobs for argument in job]
    subprocess.run(
        [sys.executable, str(script), str(assets.llama_cpp_source()), *arguments],
        check=True,
        capture_output=True,
    )
