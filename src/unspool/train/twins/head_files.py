"""Files of a draft head, as `speculate="head:FOLDER"` reads them.

    config.json           shape of the head, and the fingerprint of its model
    head.safetensors      matrices (16 bits, or quantized as in GGUF files) and the draft vocabulary

Names in the files are those of inference; matrices with the same input are concatenated there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig
from unspool.model.stored import FileTensor
from unspool.train.twins.draft import RECENT, HeadShape, rotation

CONFIG, WEIGHTS = "config.json", "head.safetensors"
_FORMAT = {"format": "unspool-draft-head", "version": 1}
_NORMS = {
    "context.norm": "context_norm", "join.state.norm": "state_norm",
    "join.word.norm": "token_norm", "attention.norm": "layers.0.norm",
    "feed.norm": "layers.0.feed_norm", "words.norm": "recent_norm", "mix.norm": "change_norm",
    "final.norm": "norm",
}  # fmt: skip
_MATRICES = {
    "features.fuse": "fuse", "attention.query": "layers.0.q", "attention.out": "layers.0.out",
    "feed.down": "layers.0.down", "words.project": "recent", "mix.state": "from_state",
    "mix.out": "change",
}  # fmt: skip


def save_head(
    weights: Mapping[str, Tensor], shape: HeadShape, config: ModelConfig, folder: Path, *,
    base: str, fingerprint: str, type: str = "F16",
) -> None:  # fmt: skip
    """Write a draft head; `type` is F16, or quantized: Q8_0, Q4_1."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    floats = {name: value.detach().float().cpu() for name, value in weights.items()}
    tensors = {name: _pack(matrix, type) for name, matrix in _matrices(floats, shape).items()}
    tensors |= {name: floats[source].numpy() for name, source in _NORMS.items()}
    for number, norm in enumerate(floats["feature_norm"].view(len(shape.layers), -1)):
        tensors[f"features.norm.{number}"] = norm.numpy()
    tensors["ids"] = weights["ids"].cpu().numpy().astype(np.int32)
    part = folder / f"{WEIGHTS}.part"
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, part)
    part.replace(folder / WEIGHTS)
    content = {
        **_FORMAT, "name": folder.name, "base": base, "fingerprint": fingerprint,
        "layers": list(shape.layers), "width": config.width, "heads": config.heads,
        "kv_heads": config.kv_heads, "head_width": config.head_width, "ff_width": config.ff_width,
        "words": RECENT, "word_width": shape.recent, "mix_width": shape.inner,
        "rope_theta": rotation(config).base, "norm_eps": config.norm_eps,
        "weights": type,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _matrices(weights: Mapping[str, Tensor], shape: HeadShape) -> dict[str, Tensor]:
    join, recent = weights["join.weight"], weights["from_recent.weight"]
    width = join.shape[0]
    gate, up = weights["layers.0.gate.weight"], weights["layers.0.up.weight"]
    return {
        **{name: weights[f"{source}.weight"] for name, source in _MATRICES.items()},
        "context.keys_values": torch.cat((weights["k.weight"], weights["v.weight"])),
        "join.state": join[:, :width],
        "join.word": join[:, width:],
        "feed.gate_up": torch.cat((gate, up)),
        "mix.last_word": recent[:, : shape.recent],
        "mix.earlier_words": recent[:, shape.recent :],
    }


def _pack(matrix: Tensor, type: str) -> Any:
    numbers = np.ascontiguousarray(matrix.numpy())
    if type == "F16":
        return numbers.astype(np.float16)
    if numbers.shape[1] % 32:
        raise ModelFileError(f"a matrix of {numbers.shape[1]} columns cannot be quantized: use F16")
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return quantize(numbers, GGMLQuantizationType[type])


def open_head(folder: Path) -> tuple[HeadShape, dict[str, Tensor]]:
    """Read a draft head; returns its shape and its state dict for training."""
    from safetensors.numpy import load_file

    config = json.loads((folder / CONFIG).read_text("utf-8"))
    tensors = load_file(folder / WEIGHTS)

    def numbers(name: str) -> Tensor:
        array = tensors[name]
        if array.dtype == np.uint8:
            quantized = FileTensor(
                config["weights"], array, _unpacked_shape(array, config["weights"])
            )
            array = quantized.float32()
        return torch.from_numpy(array.astype(np.float32))

    keys, values = numbers("context.keys_values").chunk(2)
    gate, up = numbers("feed.gate_up").chunk(2)
    features = [numbers(f"features.norm.{n}") for n in range(len(config["layers"]))]
    joined = [numbers(name) for name in ("join.state", "join.word")]
    recent = [numbers(name) for name in ("mix.last_word", "mix.earlier_words")]
    weights = {
        **{target: numbers(name) for name, target in _NORMS.items()},
        **{f"{target}.weight": numbers(name) for name, target in _MATRICES.items()},
        "feature_norm": torch.cat(features),
        "k.weight": keys,
        "v.weight": values,
        "layers.0.gate.weight": gate,
        "layers.0.up.weight": up,
        "join.weight": torch.cat(joined, 1),
        "from_recent.weight": torch.cat(recent, 1),
        "ids": torch.from_numpy(tensors["ids"].astype(np.int64)),
    }
    shape = HeadShape(
        tuple(config["layers"]), len(weights["ids"]), config["mix_width"], config["word_width"]
    )
    return shape, weights


def _unpacked_shape(array: np.ndarray[Any, Any], type: str) -> tuple[int, int]:
    rows, size = array.shape
    return rows, size // {"Q4_1": 20, "Q8_0": 34}[type] * 32
