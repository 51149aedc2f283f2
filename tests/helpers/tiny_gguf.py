"""A Llama of one layer in a GGUF file of 75 KB, with a vocabulary of single bytes: it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from unspool.text.tokenizer.pieces import byte_characters

_WIDTH, _INNER = 32, 64
_MATRICES = {
    "token_embd": (258, _WIDTH), "blk.0.attn_q": (_WIDTH, _WIDTH), "blk.0.attn_k": (16, _WIDTH),
    "blk.0.attn_v": (16, _WIDTH), "blk.0.attn_output": (_WIDTH, _WIDTH),
    "blk.0.ffn_gate": (_INNER, _WIDTH), "blk.0.ffn_up": (_INNER, _WIDTH),
    "blk.0.ffn_down": (_WIDTH, _INNER),
}  # fmt: skip
_NORMS = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")


def write_tiny(
    path: Path,
    *,
    architecture: str = "llama",
    file_type: int = 0,
    seed: int = 0,
    parts: int = 1,
    surplus: Mapping[str, tuple[int, ...]] | None = None,
    numbers: Mapping[str, int] | None = None,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
) -> Path:
    """The file; with `parts` above 1 several of them, as llama.cpp splits models.

    `surplus`: shapes of further tensors. `numbers`: further settings, or others instead. `change`
    may replace tensors; bytes are packed as Q8_0.
    """
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = len(_MATRICES) + len(_NORMS)
    writer = gguf.GGUFWriter(
        path, architecture, split_max_tensors=-(-count // parts) if parts > 1 else 0
    )
    writer.add_file_type(file_type)
    sizes = {
        "context_length": 256, "embedding_length": _WIDTH, "block_count": 1,
        "feed_forward_length": _INNER, "attention.head_count": 4, "attention.head_count_kv": 2,
        **(numbers or {}),
    }  # fmt: skip
    for name, value in sizes.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    listing = byte_characters()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(listing[n] for n in range(256)), "he", "<|end|>"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(257)
    tensors = {
        f"{name}.weight": (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
        for name, shape in _MATRICES.items()
    }
    tensors |= {f"{name}.weight": np.ones(_WIDTH, np.float32) for name in _NORMS}
    tensors |= {name: np.ones(shape, np.float32) for name, shape in (surplus or {}).items()}
    change(tensors)
    for name, data in tensors.items():
        packed = gguf.GGMLQuantizationType.Q8_0 if data.dtype == np.uint8 else None
        writer.add_tensor(name, data, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
