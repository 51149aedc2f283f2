"""A model folder where none can be fetched: random weights of Qwen3-0.6B's shape, and a vocabulary.

The vocabulary has a piece for every number, because random weights write any of them: the 256
bytes, made-up words behind a space, and the two control tokens of a chat. A letter of a prompt is
a token of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936,
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "max_position_embeddings": 40_960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
CONTROLS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> None:
    """Config, weights and vocabulary, as a checkpoint has them; needs torch."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chance = torch.Generator(device).manual_seed(0)
    width, layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
    queries = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    keys = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.randn(rows, columns, generator=chance, device=device, dtype=torch.bfloat16)
        return (made * (scale / columns**0.5)).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    # Logits that differ enough for texts to wander, as those of a trained model do.
    tensors = {"model.embed_tokens.weight": matrix(SHAPE["vocab_size"], width, 4.0)}
    tensors["model.norm.weight"] = ones(width)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = ones(width)
        for part, rows, columns in (
            ("self_attn.q_proj", queries, width), ("self_attn.k_proj", keys, width),
            ("self_attn.v_proj", keys, width), ("self_attn.o_proj", width, queries),
            ("mlp.gate_proj", SHAPE["intermediate_size"], width),
            ("mlp.up_proj", SHAPE["intermediate_size"], width),
            ("mlp.down_proj", width, SHAPE["intermediate_size"]),
        ):  # fmt: skip
            tensors[f"{name}{part}.weight"] = matrix(rows, columns)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{name}self_attn.{norm}.weight"] = ones(SHAPE["head_dim"])
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, SHAPE["vocab_size"])
    (folder / "config.json").write_text(json.dumps(SHAPE, indent=1) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level vocabulary of so many pieces, with a chat template."""
    from tokenizers import pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"Ġw{number}" for number in range(size - len(pieces) - len(CONTROLS))]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *CONTROLS])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [
            {"id": vocabulary[control], "content": control, "special": True, **flags}
            for control in CONTROLS
        ],
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
    about = {"eos_token": CONTROLS[1], "chat_template": TEMPLATE}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer", tokenizer), ("tokenizer_config", about)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
