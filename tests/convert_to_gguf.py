"""Turn transformers checkpoints into GGUF files with llama.cpp's own converter, as an oracle.

Run by the tests in a process of its own: python convert_to_gguf.py LLAMA_CPP SOURCE TARGET ...
The tiny checkpoints have no vocabulary, so that step of the converter is left out.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path


def main() -> None:
    source, *pairs = sys.argv[1:]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    logging.disable(logging.WARNING)
    for folder, target in zip(map(Path, pairs[::2]), map(Path, pairs[1::2]), strict=True):
        hparams = ModelBase.load_hparams(folder, False)
        # Keys that older configs had and the converter still asks for.
        hparams.setdefault("n_ctx", hparams.get("n_positions"))
        rope = hparams.get("rope_parameters") or {}
        hparams.setdefault("rotary_pct", rope.get("partial_rotary_factor"))
        for told in hparams.get("per_layer_config", {}).values():  # Gemma 4
            hparams["global_head_dim"] = told["head_dim"]
            hparams["num_global_key_value_heads"] = told.get("num_key_value_heads")
        size = {**hparams.get("text_config", {}), **hparams}["vocab_size"]
        vocabulary = {"model": {"vocab": {str(i): i for i in range(size)}}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
        model = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        inner = [part for part in vars(model).values() if isinstance(part, type)]
        for each in (model, *inner):
            each.set_vocab = lambda self: None
        with torch.inference_mode():
            model(folder, gguf.LlamaFileType.ALL_F32, target, hparams=hparams).write()


if __name__ == "__main__":
    main()
