"""float32 means float32: with it the native backend's logits are those of transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers import tiny
from unspool import native

pytestmark = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)
TOKENS = [int(token) for token in np.random.default_rng(4).integers(3, 259, 90)]


def read_logits(folder: Path, **options: Any) -> np.ndarray[Any, Any]:
    """The logits of every token; a fork and a rewind must give the same bits."""
    with unspool.load(folder, backend="native", threads=1, memory=8 << 20, **options) as lm:
        branch = lm.engine.open(TOKENS[:1])
        logits = np.array(lm.engine.extend(branch, TOKENS[1:], num_logits=len(TOKENS)))
        fork = lm.engine.fork(branch)
        lm.engine.extend(fork, [5, 6, 7])
        lm.engine.rewind(fork, 33)
        again = lm.engine.extend(fork, TOKENS[33:], num_logits=len(TOKENS) - 33)
        assert np.array_equal(np.array(again), logits[33:])
    return logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """A float32 checkpoint, and what transformers computes with it."""
    folder = tmp_path_factory.mktemp("float32")
    model = tiny.save("llama", folder)
    with torch.no_grad():
        return folder, model(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"kv_bits": 32}], ids=str)
def test_logits_are_those_of_transformers(
    saved: tuple[Path, np.ndarray[Any, Any]], options: dict[str, Any]
):
    folder, reference = saved
    assert np.abs(read_logits(folder, **options) - reference).max() < 1e-4


def test_the_kv_cache_is_rounded_to_16_bits_by_default(saved: tuple[Path, np.ndarray[Any, Any]]):
    folder, reference = saved
    assert 1e-4 < np.abs(read_logits(folder) - reference).max() < 0.05


PLAIN = """
import sys
import numpy, unspool
from unspool import native
tokens = [int(token) for token in sys.argv[3].split()]
with unspool.load(sys.argv[1], backend="native", threads=1, dtype="float32") as lm:
    branch = lm.engine.open(tokens)
    numpy.save(sys.argv[2], lm.engine.extend(branch, num_logits=len(tokens)))
print(native.instruction_set())
"""


def test_logits_of_plain_kernels(saved: tuple[Path, np.ndarray[Any, Any]], tmp_path: Path):
    """In a child process: the instruction set is chosen once per process."""
    folder, reference = saved
    target = tmp_path / "logits.npy"
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(folder), str(target), " ".join(map(str, TOKENS))],
        env={**os.environ, "UNSPOOL_ISA": "plain"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "plain"
    assert np.abs(np.load(target) - reference).max() < 1e-4
