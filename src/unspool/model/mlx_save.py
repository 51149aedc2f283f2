"""A folder's matrices as MLX has them: whole numbers in groups of 32, with scale and minimum.

mlx-lm reads such a folder, and so do we (`quantized.py`). Vectors, and matrices whose rows cannot
be cut into groups, stay floats.
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
    """Replace the safetensors of a folder, written in 32 bits, by quantized ones."""
    from safetensors.numpy import load_file, save_file

    where: dict[str, str] = {}
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        kept: dict[str, npt.NDArray[Any]] = {}
        for name, numbers in load_file(file).items():
            if name.endswith(".weight") and numbers.ndim == 2 and numbers.shape[1] % GROUP == 0:
                at = name.removesuffix(".weight")
                words, scales, minima = quantized(numbers, bits)
                kept |= {name: words, f"{at}.scales": scales, f"{at}.biases": minima}
            else:
                kept[name] = numbers.astype(np.float16)
        part = file.with_name(f"{file.name}.part")
        save_file(kept, part, metadata={"format": "mlx"})
        part.replace(file)
        where.update(dict.fromkeys(kept, file.name))
        total += sum(array.nbytes for array in kept.values())
    index = folder / "model.safetensors.index.json"
    if index.exists():
        told = {"metadata": {"total_size": total}, "weight_map": where}
        index.write_text(json.dumps(told, indent=2), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization"] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def quantized(
    matrix: Floats, bits: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Numbers packed into words of 32 bits, the first lowest; scales and minima in 16 bits."""
    rows = len(matrix)
    groups = matrix.reshape(rows, -1, GROUP)
    minima = groups.min(-1).astype(np.float16)
    spread = groups.max(-1) - minima.astype(np.float32)
    scales = np.maximum(spread / (2**bits - 1), 1e-7).astype(np.float16)
    away = groups - minima.astype(np.float32)[..., None]
    numbers = np.rint(away / scales.astype(np.float32)[..., None]).clip(0, 2**bits - 1)
    each = numbers.reshape(rows, -1, 32 // bits).astype(np.uint32)
    places = np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(each << places, -1), scales, minima
