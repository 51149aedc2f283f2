"""Logits have the same bits on every processor: each instruction set gives the recorded hashes.

The hashes are those of all instruction sets on x86-64 and ARM. They change only with the arithmetic
of the kernels; `python tests/backends/cpu/test_same_bits.py` prints them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import recurrent_texts
from helpers.paged_texts import Library, RandomCheckpoint, config, read
from unspool import native
from unspool.backends.cpu.model import CpuModel
from unspool.model.config import Rotary
from unspool.sampling import Chain, RowInput, SamplingSettings

pytestmark = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)

TOKENS = 67
LONG = "Q4_0"  # the case with a text longer than a segment of attention
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Q4_0": ("Q4_0", 16, {}),
    "Q4_1": ("Q4_1", 8, {"activation": "gelu", "norm": "layer"}),
    "Q8_0": ("Q8_0", 16, {"rotary": Rotary(width=64, base=5e5, scaling="llama3", factor=8.0,
                                           original_context=256)}),
    "Q4_K": ("Q4_K", 16, {"qk_norm": "head"}),
    "Q6_K": ("Q6_K", 16, {"attention_softcap": 30.0, "activation": "gelu_tanh"}),
    "Q5_0": ("Q5_0", 32, {"windows": (40, 0)}),
    "MXFP4": ("MXFP4", 16, {"experts": 3, "experts_per_token": 2, "expert_width": 256}),
    "F32": ("F32", 32, {}),
}  # fmt: skip
HASHES = {
    "Q4_0": "2eadd55a8771e083",
    "Q4_1": "a1c02705fe65ae54",
    "Q8_0": "f7d2f6a2eb636426",
    "Q4_K": "3ae0e361c3b2c803",
    "Q6_K": "50e4f8501a692d04",
    "Q5_0": "5ceba0f64ab4b8d6",
    "MXFP4": "30110fc03cc2e7d9",
    "F32": "2e80ae5cd46ee0cc",
    "conv": "50244cb7f2c01456",
    "delta": "6fe44c645effcdf4",
    "tiled": "616d40e1c88af156",
    "sigmoid router": "18161df25cdd2457",
    "mamba2": "8ba0e026b63dd1fe",
    "halves": "d5ef6b1aa4efd6e4",
    "sampled": "c671a31b5a03f71b",
    "sampled, many": "64d3d0b3d0796f61",
}


def logits_of(name: str) -> np.ndarray[Any, Any]:
    kind, kv_bits, changes = CASES[name]
    shape = {"width": 256, "ff_width": 256, "head_width": 64, **changes}
    model = CpuModel(
        RandomCheckpoint(config(**shape), kind), store=None, threads=2, kv_bits=kv_bits
    )
    backend = model.backend(memory=1 << 26, context=2048)
    counts = (1, 2, 4, 500 if name == LONG else 30, 23)
    text = Library(backend.page_count, TOKENS, seed=5).text(sum(counts))
    return np.concatenate([read(backend, [(text, count)])[0] for count in counts])


def hash_of(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def all_hashes() -> dict[str, str]:
    logits = {name: logits_of(name) for name in CASES}
    for name in recurrent_texts.SHAPES:
        shelf = recurrent_texts.Shelf(recurrent_texts.native(name))
        logits[name] = shelf.read_all(recurrent_texts.some_tokens(40), 13)
    hashes = {name: hash_of(values) for name, values in logits.items()}
    settings = SamplingSettings(seed=7, temperature=0.9, top_k=0, top_p=0.95, typical_p=0.9)
    rows = [RowInput(position=n) for n in range(32)]
    narrow = logits["F32"][-32:]
    wide = np.hstack([narrow - np.float32(n) for n in range(8)])  # sampled by the native library
    for name, values in (("sampled", narrow), ("sampled, many", wide)):
        picks = Chain([settings] * 32).pick(values, rows)
        hashes[name] = hash_of(np.array([(pick.token, pick.logprob) for pick in picks]))
    return hashes


@pytest.mark.parametrize("isa", ["plain", "neon", "i8mm", "avx2", "avxvnni", "avx512", "amx"])
def test_every_instruction_set_gives_the_recorded_bits(isa: str) -> None:
    environment = {
        **os.environ, "UNSPOOL_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    if "this processor does not have" in done.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == HASHES


if __name__ == "__main__":
    print(json.dumps(all_hashes(), indent=4))
