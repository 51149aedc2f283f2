"""Quantize a safetensors folder in MLX's format: groups of 32 integers with scale and minimum.

mlx-lm and `quantized.py` read such folders. Vectors, and matrices whose rows are not a multiple of
32, stay floats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32
Floats = npt.NDArray[np.float32]


def quantize_folder(folder: Path, bits: int) -> None:
    """Quantize the float32 safetensors of a folder in place."""
    from safetensors.numpy import load_file, save_file

    file_of: dict[str, str] = {}
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, npt.NDArray[Any]] = {}
        for name, numbers in load_file(file).items():
            if name.endswith(".weight") and numbers.ndim == 2 and numbers.shape[1] % GROUP == 0:
                at = name.removesuffix(".weight")
                words, scales, minima = quantized(numbers, bits)
                tensors |= {name: words, f"{at}.scales": scales, f"{at}.biases": minima}
            else:
                tensors[name] = numbers.astype(np.float16)
        part = file.with_name(f"{file.name}.part")
        save_file(tensors, part, metadata={"format": "mlx"})
        part.replace(file)
        file_of.update(dict.fromkeys(tensors, file.name))
        total += sum(array.nbytes for array in tensors.values())
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index_content = {"metadata": {"total_size": total}, "weight_map": file_of}
        index.write_text(json.dumps(index_content, indent=2), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization"] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def quantized(
    matrix: Floats, bits: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Packed 32-bit words (the first number in the lowest bits), float16 scales and minima."""
    rows = len(matrix)
    groups = matrix.reshape(rows, -1, GROUP)
    minima = groups.min(-1).astype(np.float16)
    spread = groups.max(-1) - minima.astype(np.float32)
    scales = np.maximum(spread / (2**bits - 1), 1e-7).astype(np.float16)
    offsets = groups - minima.astype(np.float32)[..., None]
    numbers = np.rint(offsets / scales.astype(np.float32)[..., None]).clip(0, 2**bits - 1)
    packed_groups = numbers.reshape(rows, -1, 32 // bits).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(packed_groups << shifts, -1), scales, minima
