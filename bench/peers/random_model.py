"""A random model in the shape of Qwen3.5-0.8B, to measure recurrent layers: 18 layers of gated
DeltaNet and 6 of attention, 4-bit matrices, a vocabulary that knows single bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WIDTH, LAYERS, INNER, VOCABULARY = 1024, 24, 3584, 248_320
HEADS, KV_HEADS, HEAD_WIDTH = 8, 2, 256
DELTA_HEADS, DELTA_WIDTH, KERNEL, EVERY = 16, 128, 4, 4
_DELTA = DELTA_HEADS * DELTA_WIDTH


def random_model(path: Path) -> None:
    """Written once; its bytes are those of real quantized blocks."""
    if path.exists():
        return
    from gguf import GGMLQuantizationType, GGUFWriter

    from unspool.text.tokenizer.pieces import byte_characters

    rng = np.random.default_rng(0)
    beside = path.with_suffix(".part")
    writer = GGUFWriter(beside, "qwen35")
    numbers = {
        "block_count": LAYERS, "context_length": 32_768, "embedding_length": WIDTH,
        "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_WIDTH,
        "attention.value_length": HEAD_WIDTH, "rope.dimension_count": HEAD_WIDTH // 4,
        "full_attention_interval": EVERY, "ssm.conv_kernel": KERNEL, "ssm.state_size": DELTA_WIDTH,
        "ssm.group_count": DELTA_HEADS, "ssm.time_step_rank": DELTA_HEADS, "ssm.inner_size": _DELTA,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_float32("qwen35.rope.freq_base", 1e7)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    letters = byte_characters()
    writer.add_token_list([*letters, *(f"<{n}>" for n in range(len(letters), VOCABULARY))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(VOCABULARY - 1)

    def matrix(name: str, rows: int, columns: int, kind: str = "Q4_0") -> None:
        size = {"Q4_0": 16, "Q8_0": 32}[kind]
        data = rng.integers(0, 256, (rows, columns // 32, 2 + size), np.uint8)
        spread = (4.6 if kind == "Q4_0" else 74) * columns**0.5
        data[..., :2] = np.frombuffer(np.float16(1 / spread).tobytes(), np.uint8)
        writer.add_tensor(
            f"{name}.weight", data.reshape(rows, -1), raw_dtype=GGMLQuantizationType[kind]
        )

    def vector(name: str, *shape: int, middle: float = 1.0) -> None:
        values = middle + 0.1 * rng.standard_normal(shape)
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd", VOCABULARY, WIDTH, "Q8_0")
    vector("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        vector(f"{at}attn_norm.weight", WIDTH)
        vector(f"{at}post_attention_norm.weight", WIDTH)
        if (layer + 1) % EVERY:
            matrix(f"{at}attn_qkv", 3 * _DELTA, WIDTH)
            matrix(f"{at}attn_gate", _DELTA, WIDTH)
            matrix(f"{at}ssm_alpha", DELTA_HEADS, WIDTH, "Q8_0")
            matrix(f"{at}ssm_beta", DELTA_HEADS, WIDTH, "Q8_0")
            vector(f"{at}ssm_conv1d.weight", 3 * _DELTA, KERNEL, middle=0.2)
            vector(f"{at}ssm_a", DELTA_HEADS, middle=-1.0)
            vector(f"{at}ssm_dt.bias", DELTA_HEADS, middle=-2.0)
            vector(f"{at}ssm_norm.weight", DELTA_WIDTH)
            matrix(f"{at}ssm_out", WIDTH, _DELTA)
        else:
            matrix(f"{at}attn_q", 2 * HEADS * HEAD_WIDTH, WIDTH)
            matrix(f"{at}attn_k", KV_HEADS * HEAD_WIDTH, WIDTH)
            matrix(f"{at}attn_v", KV_HEADS * HEAD_WIDTH, WIDTH)
            vector(f"{at}attn_q_norm.weight", HEAD_WIDTH)
            vector(f"{at}attn_k_norm.weight", HEAD_WIDTH)
            matrix(f"{at}attn_output", WIDTH, HEADS * HEAD_WIDTH)
        matrix(f"{at}ffn_gate", INNER, WIDTH)
        matrix(f"{at}ffn_up", INNER, WIDTH)
        matrix(f"{at}ffn_down", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    beside.replace(path)
