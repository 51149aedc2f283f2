"""The token that stands for "not known yet": one that no text uses, with a vector of its own.

mask = mask_token(config, tokenizer)
own_mask_vector(model, mask)            # the table stays frozen, the mask's vector is trained
weights = with_mask(weights, mask)      # for a checkpoint: the vector is a row of the table
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unspool.errors import SettingsError
from unspool.model.config import ModelConfig
from unspool.model.transformer import Transformer
from unspool.text.tokenizer.tokenizer import Tokenizer

_MASKS = ("<|mask|>", "<mask>", "[MASK]", "<|MASK|>", "<|mdm_mask|>")
_MASK_VECTOR = "embed.mask"


def mask_token(config: ModelConfig, tokenizer: Tokenizer) -> int:
    """A token for the mask: the model's own, one that is called so, a control token that neither
    the chat template nor the end of a text uses, or a place behind the vocabulary."""
    if config.mask_id is not None:
        return config.mask_id
    named = [tokenizer.special_tokens[name] for name in _MASKS if name in tokenizer.special_tokens]
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
    if config.vocab_size > tokenizer.vocab_size:  # many tables are longer than their vocabulary
        return config.vocab_size - 1
    raise SettingsError(
        "the model's vocabulary has no token that texts do not use, so none can be the mask; name "
        "one that yours do not have: --mask ID"
    )


class MaskedEmbedding(nn.Embedding):
    """The frozen table of another embedding; one token has a vector that is trained."""

    def __init__(self, table: nn.Embedding, mask_id: int) -> None:
        with torch.device("meta"):  # no memory: the weights are the table's
            super().__init__(table.num_embeddings, table.embedding_dim)
        self.weight, self.mask_id = table.weight, mask_id
        self.mask = nn.Parameter(table.weight.detach()[mask_id].float().clone())

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return torch.where((input == self.mask_id)[..., None], self.mask.to(x.dtype), x)


def own_mask_vector(model: Transformer, mask_id: int, *, fresh: bool) -> None:
    """Train a vector for the mask. A fresh one begins near the middle of all tokens."""
    embedding = MaskedEmbedding(model.embed, mask_id)
    if fresh:
        with torch.no_grad():
            table = model.embed.weight.float()
            embedding.mask.copy_(table.mean(0) + 0.5 * table[mask_id])
    model.embed = embedding


def with_mask(weights: Mapping[str, Tensor], mask_id: int) -> dict[str, Tensor]:
    """The weights of a model whose table holds the mask's vector, as any other token's."""
    plain = dict(weights)
    mask = plain.pop(_MASK_VECTOR, None)
    if mask is not None:
        plain["embed.weight"] = plain["embed.weight"].clone()
        plain["embed.weight"][mask_id] = mask.to(plain["embed.weight"])
    return plain
