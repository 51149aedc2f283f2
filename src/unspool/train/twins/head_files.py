"""A drafting head as the files that `speculate="head:FOLDER"` reads.

    config.json           what the head is, and a fingerprint of the model that it reads
    head.safetensors      its matrices (16 bits, or packed as in GGUF files) and the tokens it knows

The names there say what each matrix is for when a text is drafted token by token; here matrices
that are multiplied with the same vector are one.
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
from unspool.model.stored import Stored
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
    """Write a head; `type` is F16, or packed: Q8_0, Q4_1."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value.detach().float().cpu() for name, value in weights.items()}
    tensors = {name: _stored(matrix, type) for name, matrix in _matrices(own, shape).items()}
    tensors |= {name: own[mine].numpy() for name, mine in _NORMS.items()}
    for number, norm in enumerate(own["feature_norm"].view(len(shape.layers), -1)):
        tensors[f"features.norm.{number}"] = norm.numpy()
    tensors["ids"] = weights["ids"].cpu().numpy().astype(np.int32)
    part = folder / f"{WEIGHTS}.part"
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, part)
    part.replace(folder / WEIGHTS)
    told = {
        **_FORMAT, "name": folder.name, "base": base, "fingerprint": fingerprint,
        "layers": list(shape.layers), "width": config.width, "heads": config.heads,
        "kv_heads": config.kv_heads, "head_width": config.head_width, "ff_width": config.ff_width,
        "words": RECENT, "word_width": shape.recent, "mix_width": shape.inner,
        "rope_theta": rotation(config).base, "norm_eps": config.norm_eps,
        "weights": type,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _matrices(own: Mapping[str, Tensor], shape: HeadShape) -> dict[str, Tensor]:
    join, recent = own["join.weight"], own["from_recent.weight"]
    width = join.shape[0]
    return {
        **{name: own[f"{mine}.weight"] for name, mine in _MATRICES.items()},
        "context.keys_values": torch.cat((own["k.weight"], own["v.weight"])),
        "join.state": join[:, :width],
        "join.word": join[:, width:],
        "feed.gate_up": torch.cat((own["layers.0.gate.weight"], own["layers.0.up.weight"])),
        "mix.last_word": recent[:, : shape.recent],
        "mix.earlier_words": recent[:, shape.recent :],
    }


def _stored(matrix: Tensor, type: str) -> Any:
    numbers = np.ascontiguousarray(matrix.numpy())
    if type == "F16":
        return numbers.astype(np.float16)
    if numbers.shape[1] % 32:
        raise ModelFileError(f"a matrix of {numbers.shape[1]} columns cannot be packed: use F16")
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return quantize(numbers, GGMLQuantizationType[type])


def open_head(folder: Path) -> tuple[HeadShape, dict[str, Tensor]]:
    """A head that was saved, under the names that it is trained with."""
    from safetensors.numpy import load_file

    told = json.loads((folder / CONFIG).read_text("utf-8"))
    kept = load_file(folder / WEIGHTS)

    def numbers(name: str) -> Tensor:
        array = kept[name]
        if array.dtype == np.uint8:
            array = Stored(told["weights"], array, _unpacked(array, told["weights"])).float32()
        return torch.from_numpy(array.astype(np.float32))

    keys, values = numbers("context.keys_values").chunk(2)
    gate, up = numbers("feed.gate_up").chunk(2)
    features = [numbers(f"features.norm.{n}") for n in range(len(told["layers"]))]
    joined = [numbers(name) for name in ("join.state", "join.word")]
    recent = [numbers(name) for name in ("mix.last_word", "mix.earlier_words")]
    found = {
        **{mine: numbers(name) for name, mine in _NORMS.items()},
        **{f"{mine}.weight": numbers(name) for name, mine in _MATRICES.items()},
        "feature_norm": torch.cat(features),
        "k.weight": keys,
        "v.weight": values,
        "layers.0.gate.weight": gate,
        "layers.0.up.weight": up,
        "join.weight": torch.cat(joined, 1),
        "from_recent.weight": torch.cat(recent, 1),
        "ids": torch.from_numpy(kept["ids"].astype(np.int64)),
    }
    tokens = len(found["ids"])
    return HeadShape(tuple(told["layers"]), tokens, told["mix_width"], told["word_width"]), found


def _unpacked(array: np.ndarray[Any, Any], type: str) -> tuple[int, int]:
    rows, size = array.shape
    return rows, size // {"Q4_1": 20, "Q8_0": 34}[type] * 32
