"""Turn transformers checkpoints into GGUF files with llama.cpp's own converter, as an oracle.

Run by the tests in a separate process, because llama.cpp has another version of the `gguf` package.
The tiny checkpoints have no vocabulary, so that step of the converter is skipped, or, for files
that llama.cpp opens, writes a dummy vocabulary.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

_LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


def set_vocab(model: Any) -> None:
    """Letters, then numbers."""
    from gguf import TokenType

    size = model.hparams["vocab_size"]
    tokens = [chr(256 + i) if i < 33 else chr(i) if i < 127 else f"[{i}]" for i in range(size)]
    model.gguf_writer.add_tokenizer_model("gpt2")
    model.gguf_writer.add_tokenizer_pre("default")
    model.gguf_writer.add_token_list(tokens)
    model.gguf_writer.add_token_types([TokenType.NORMAL] * size)
    model.gguf_writer.add_token_merges(["A B"])


def main(source: str, *jobs: str) -> None:
    """Convert by llama.cpp's sources; each job is "plain" or "vocabulary", a folder and a file."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        del sys.modules[name]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    torch.set_num_threads(1)  # the threads of a forked process are gone
    logging.disable(logging.WARNING)
    load_hparams = ModelBase.load_hparams
    for vocabulary_kind, source_name, target_name in zip(*[iter(jobs)] * 3, strict=True):
        folder, target = Path(source_name), Path(target_name)
        hparams = load_hparams(folder, False)
        # Keys that older configs had and the converter still asks for.
        hparams.setdefault("n_ctx", hparams.get("n_positions"))
        rope = hparams.get("rope_parameters") or {}
        hparams.setdefault("rotary_pct", rope.get("partial_rotary_factor"))
        for layer_config in hparams.get("per_layer_config", {}).values():  # Gemma 4
            hparams["global_head_dim"] = layer_config["head_dim"]
            hparams["num_global_key_value_heads"] = layer_config.get("num_key_value_heads")
        if "layers_block_type" in hparams:  # Nemotron: one letter a layer
            kinds, groups = hparams.pop("layers_block_type"), hparams["n_groups"]
            hparams["hybrid_override_pattern"] = "".join(_LETTERS[kind] for kind in kinds)
            hparams["num_hidden_layers"] = len(kinds)
            hparams["mamba_d_head"] = hparams["mamba_head_dim"]
            hparams["norm_eps"] = hparams["layer_norm_epsilon"]
            if "moe" not in kinds:  # files of such models say nothing of experts
                for key in [key for key in hparams if "expert" in key or "_group" in key]:
                    del hparams[key]
                hparams["n_groups"] = groups
        if hparams["model_type"] == "granitemoehybrid":
            words = {"full_attention": "attention", "linear_attention": "mamba"}
            hparams["layer_types"] = [words[kind] for kind in hparams["layer_types"]]
            if not hparams["num_local_experts"]:
                hparams["num_experts_per_tok"] = 0
        ModelBase.load_hparams = staticmethod(lambda *_, settings=hparams, **__: settings)
        size = {**hparams.get("text_config", {}), **hparams}["vocab_size"]
        vocabulary = {"model": {"vocab": {str(i): i for i in range(size)}}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
        model = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        inner = [part for part in vars(model).values() if isinstance(part, type)]
        for converter in (model, *inner):
            converter.set_vocab = (
                set_vocab if vocabulary_kind == "vocabulary" else lambda self: None
            )
        with torch.inference_mode():
            model(folder, gguf.LlamaFileType.ALL_F32, target, hparams=hparams).write()
