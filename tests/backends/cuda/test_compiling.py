"""The kernels are compiled for a GPU, also where there is none: the interpreter forgives more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py")],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        "attend", "change_rows", "combine", "convolve", "copy_segments", "down_project",
        "exclude_tokens", "expand", "finish", "gather_down", "gather_up", "gemv_kernel",
        "group_pairs", "measure_rows", "merge_parts", "packed_gemm", "packed_gemv", "prefill",
        "prepare_chunks", "recur_tokens", "route", "route_few", "scan_chunks",
        "select_experts", "short_conv", "short_conv_stats", "shrink", "store_conv",
        "store_keys", "up_project",
    ]  # fmt: skip
