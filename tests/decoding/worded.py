"""A tiny random model with a vocabulary of its own: words of several tokens, spaces before them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>",
       "<|file_sep|>")  # fmt: skip
SIZE = 512


def save_worded(folder: Path, specials: tuple[str, ...] = (), seed: int = 0) -> Path:
    """A checkpoint with a byte-level vocabulary that was learned from a page of text."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=["<|endoftext|>", *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT], trainer)
    shape = {**tiny._SHAPE, "vocab_size": SIZE, "max_position_embeddings": 512}
    del shape["bos_token_id"]
    torch.manual_seed(seed)
    model = tiny.randomized(_llama(shape))
    model.save_pretrained(folder)
    library.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def _llama(shape: dict[str, Any]) -> Any:
    import transformers

    shape = {**shape, "eos_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
