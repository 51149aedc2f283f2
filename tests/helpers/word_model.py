"""A tiny random model with a small vocabulary: words of several tokens, with leading spaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from helpers import tiny

TEXT = """
The scheduler plans rows, and the batch builder makes a step of them. A branch stands at a node of
the tree: a node is one full page of tokens, and its parents are the pages before it. Behind its
node a branch has a short tail of its own, which nobody else reads. So a fork of the branch copies
at most one page, and rewinding walks up as many nodes as pages are dropped.

A page belongs to one place: to a node, which many read, or to the tail of a branch, which alone
writes it. When room is needed, the pages that nobody has used for the longest time are given back.
It's the same with a text that waits: what was computed of it stays, as long as there is room, and
is computed again later if it's gone; slower, never different. Tokens may be provisional: computed,
replaced, and computed again, until somebody says that the text is done.
"""
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
    with patch.dict(tiny.FAMILIES, worded=_llama):
        tiny.make("worded", seed).save_pretrained(folder)
    library.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


# What a chat template must have for tests: turns, and marks that only it can write.
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def save_chatty(folder: Path, seed: int = 0) -> Path:
    """The same with a chat template, and a mark that process-reward models look for."""
    save_worded(folder, ("<|turn|>", "<extra_0>"), seed)
    file = folder / "tokenizer_config.json"
    named = json.loads(file.read_text())
    file.write_text(json.dumps({**named, "chat_template": TEMPLATE}))
    return folder


def _llama() -> Any:
    import transformers

    shape = {"vocab_size": SIZE, "max_position_embeddings": 512, "eos_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny._SHAPE, **shape}))
