"""The mask token of a masked twin: an unused token with a trainable embedding.

mask = mask_token(config, tokenizer)
add_mask_embedding(model, mask)                 # trains one vector, the table stays frozen
weights = merge_mask_embedding(weights, mask)   # for a checkpoint: the vector becomes a row
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unspool.errors import SettingsError
from unspool.model.config import ModelConfig
from unspool.model.transformer import Transformer
from unspool.text.tokenizer.tokenizer import Tokenizer

_MASK_NAMES = ("<|mask|>", "<mask>", "[MASK]", "<|MASK|>", "<|mdm_mask|>")
_MASK_VECTOR = "embed.mask"


def mask_token(config: ModelConfig, tokenizer: Tokenizer) -> int:
    """Choose a mask token.

    In order: the model's own, a special token with a mask's name, an unused special token, or an id
    after the vocabulary, if the embedding table has one.
    """
    if config.mask_id is not None:
        return config.mask_id
    specials = tokenizer.special_tokens
    named = [specials[name] for name in _MASK_NAMES if name in specials]
    if named:
        return named[0]
    used = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.pad_id}
    used |= {*tokenizer.end_ids, *config.end_ids}
    template = tokenizer.chat_template or ""
    free = [
        token
        for text, token in tokenizer.special_tokens.items()
        if token not in used and token < config.vocab_size and text not in template
    ]
    if free:
        return max(free)
    if config.vocab_size > tokenizer.vocab_size:  # many embedding tables are padded
        return config.vocab_size - 1
    raise SettingsError(
        "the tokenizer has no unused token for the mask; name one that does not occur in your "
        "texts: --mask ID"
    )


class MaskedEmbedding(nn.Embedding):
    """A frozen embedding table with a trainable vector for one token."""

    def __init__(self, table: nn.Embedding, mask_id: int) -> None:
        with torch.device("meta"):  # no allocation: the weights are those of `table`
            super().__init__(table.num_embeddings, table.embedding_dim)
        self.weight, self.mask_id = table.weight, mask_id
        self.mask = nn.Parameter(table.weight.detach()[mask_id].float().clone())

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return torch.where((input == self.mask_id)[..., None], self.mask.to(x.dtype), x)


def add_mask_embedding(model: Transformer, mask_id: int, *, fresh: bool) -> None:
    """Make the mask's embedding trainable; a fresh one starts near the mean of all tokens."""
    embedding = MaskedEmbedding(model.embed, mask_id)
    if fresh:
        with torch.no_grad():
            table = model.embed.weight.float()
            embedding.mask.copy_(table.mean(0) + 0.5 * table[mask_id])
    model.embed = embedding


def merge_mask_embedding(weights: Mapping[str, Tensor], mask_id: int) -> dict[str, Tensor]:
    """The weights with the mask's vector as a row of the embedding table."""
    merged = dict(weights)
    mask = merged.pop(_MASK_VECTOR, None)
    if mask is not None:
        merged["embed.weight"] = merged["embed.weight"].clone()
        merged["embed.weight"][mask_id] = mask.to(merged["embed.weight"])
    return merged
