"""A small model with its own tokenizer, as a folder like those that training writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_TEXT = [
    "The state of the union is strong, and the people of the United States are free. " * 3,
    "We'll do 1234567 things in 1999, don't you think? \n\n  Yes: they've done it already!",
    "import os\n\ndef main():\n    return {'a': 1}\n",
]
TEXTS = [
    "The union's 12345 states,\n\n  aren't they?",
    "  été 我想 🦙 x=1\n\n\n",
    "<|end|> as text",
]


def save_vocabulary(folder: Path, size: int = 298, pattern: str | None = None) -> None:
    """A byte-level vocabulary of `size` tokens in the way that GPT-2 or `pattern` cuts text."""
    library = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, plain])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>", "<|user|>", "<|assistant|>"],
        show_progress=False,
    )
    library.train_from_iterator(_TEXT, trainer)
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<|start|>", "eos_token": "<|end|>", "add_bos_token": false, '
        '"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def save_model(folder: Path, name: str = "Qwen3", vocab: int = 300, **changes: Any) -> Any:
    """A random model with widths that fit the blocks of packed types; the transformers model."""
    from helpers import tiny

    shape = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    tiny.FAMILIES["small"] = tiny.named(name, **{**shape, **changes})
    model = tiny.save("small", folder)
    save_vocabulary(folder)
    return model
