"""Multi-token prediction (MTP): a layer that predicts the token after the next one.

    x = fc([norm(embedding of token t + 1); norm(hidden state of position t)])
    hidden state = norm(layer(x))        # the model's own output head predicts token t + 2 from it

The hidden state of the model is the one after its final norm, which its head reads too. For further
tokens the layer's own hidden state takes its place (as in vLLM and SGLang).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unspool.model.config import ModelConfig
from unspool.model.layers.parts import Norm
from unspool.model.layers.transformer import AttentionFunction, Layer, RopeTables


class MtpLayer(nn.Module):
    """The MTP layer of a model; `config` is that of the layer (`ModelConfig.mtp_layer_config`)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_norm, self.hidden_norm, self.norm = (
            Norm(config, config.width, config.norm) for _ in range(3)
        )
        self.fc = nn.Linear(2 * config.width, config.width, bias=False)
        self.layer = Layer(config, 0)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Join embeddings of tokens with the hidden states before them, [..., width] each."""
        joined = torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), -1)
        projected: Tensor = self.fc(joined)
        return projected

    def forward(
        self, embedded: Tensor, hidden: Tensor, angles: RopeTables | None, attend: AttentionFunction
    ) -> Tensor:
        """Hidden states [batch, length, width] that predict the tokens after `embedded`."""
        states: Tensor = self.norm(self.layer(self.join(embedded, hidden), angles, None, attend))
        return states
