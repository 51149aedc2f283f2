"""Models with random weights, of any shape, as people would have them from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def transformer(shape: dict[str, Any], dtype: str, device: str) -> Any:
    """The plain transformer, made on the device; its texts wander."""
    import torch

    from unspool.model.files.config_json import config_from_hf
    from unspool.model.layers.transformer import Transformer

    config = config_from_hf(shape)
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device), torch.no_grad():
            model = Transformer(config)
            scale = 4 / config.width**0.5
            model.embed.weight.normal_(0, scale if config.tied else 1)
            if model.head is not None:
                model.head.weight.normal_(0, scale)
    finally:
        torch.set_default_dtype(usual)
    return model.eval().requires_grad_(False)


def loaded(shape: dict[str, Any], dtype: str, device: str, backend: str, exact: bool) -> Any:
    """The model on one of our backends: cuda, or torch (the plain path)."""
    plain = transformer(shape, dtype, device)
    if backend == "torch":
        from unspool.backends.torch.backend import TorchModel

        return TorchModel(plain)
    from unspool.backends.cuda.model import CudaModel
    from unspool.backends.cuda.weights import fuse_weights

    more = {"exact": True} if exact else {}
    return CudaModel(fuse_weights(plain), lambda: "random", **more)


def weight_bytes(config: Any, each: float) -> float:
    """What is read for one token where each number takes so many bytes: of the embedding a row."""
    from unspool.model.weights import weight_shapes

    numbers = sum(int(np.prod(size)) for size in weight_shapes(config).values())
    if not config.tied:
        numbers -= config.vocab_size * config.width
    return numbers * each


def write_gguf(shape: dict[str, Any], packing: str, path: Path) -> float:
    """A GGUF file of random blocks; gives back the bytes that one token must read of it."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    out, inner = heads * shape["head_dim"], shape["intermediate_size"]
    writer.add_block_count(layers)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    sizes = {
        "attn_q": (out, width),
        "attn_k": (kv * shape["head_dim"], width),
        "attn_v": (kv * shape["head_dim"], width),
        "attn_output": (width, out),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    kind = getattr(gguf.GGMLQuantizationType, packing)
    made: dict[tuple[int, int], Any] = {}  # the layers' numbers may be the same: nobody reads them

    def add(name: str, size: tuple[int, int]) -> int:
        if size not in made:
            made[size] = _blocks(size, packing)
        writer.add_tensor(name, made[size], raw_dtype=kind)
        return int(made[size].nbytes)

    add("token_embd.weight", (shape["vocab_size"], width))
    read = add("output.weight", (shape["vocab_size"], width))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
        read += sum(add(f"blk.{layer}.{name}.weight", size) for name, size in sizes.items())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


_SCALES = {"Q4_0": (18, 32, (0,)), "Q8_0": (34, 32, (0,)), "Q4_K": (144, 256, (0, 2))}


def _blocks(size: tuple[int, int], packing: str) -> Any:
    """Random blocks with small scales: bytes of a block, numbers in it, where its scales stand."""
    each, numbers, scales = _SCALES[packing]
    rows, columns = size
    chance = np.random.default_rng(rows * 31 + columns)
    pool = chance.integers(0, 256, (min(rows, 1024), columns // numbers, each), dtype=np.uint8)
    # So that a product keeps the size of what goes in, whatever the packing's largest number is.
    largest = {"Q4_0": 8, "Q8_0": 128, "Q4_K": 15 * 63}[packing]
    scale = np.float16(1.7 / largest / columns**0.5)
    for at in scales:
        pool[:, :, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    if len(scales) > 1:  # the least of a block is subtracted: half of what its largest number is
        least = np.float16(float(scale) * 7.5)
        pool[:, :, scales[1] : scales[1] + 2] = np.frombuffer(least.tobytes(), np.uint8)
    flat = pool.reshape(len(pool), -1)
    return np.ascontiguousarray(np.tile(flat, (-(-rows // len(flat)), 1))[:rows])
