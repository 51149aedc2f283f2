"""The multi-token prediction layer of the model's checkpoint as a drafting head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unspool.backends.step import LoadedModel
from unspool.decoding.speculative.head import DraftHead, LayerInput
from unspool.errors import ModelFileError, SettingsError
from unspool.model.files.checkpoint import open_checkpoint
from unspool.model.files.mtp import MtpTensors
from unspool.model.layers.mtp import MtpLayer


class MtpHead(DraftHead):
    """An MTP layer with its weights; embeddings and output head are the model's."""

    def __init__(self, path: Path, tensors: MtpTensors, model: LoadedModel, context: int) -> None:
        config = tensors.config
        if config.norm != "rms" or config.rotary is None:
            raise ModelFileError(f"{path}: MTP layers need RMSNorm and RoPE")
        super().__init__(path.name, model, (model.config.layers,), context)
        self.rotary, self.ids = config.rotary, np.arange(config.vocab_size)
        with torch.device("meta"):
            self._mtp = MtpLayer(config)
        try:
            state = {name: self.to_tensor(stored.float32()) for name, stored in tensors.weights()}
        except ModelFileError as error:
            raise ModelFileError(f"{path}: {error}") from error
        self._mtp.load_state_dict(state, assign=True)
        self._mtp.requires_grad_(False)
        self.attention = self._mtp.layer.attention
        gain = model.vector("norm.weight")
        assert gain is not None, "the model has an RMSNorm before its head"
        self._gain = torch.from_numpy(np.array(gain)).to(self.device).float()

    def read_hidden(self, vectors: Tensor) -> Tensor:
        """Apply the model's final norm: the layer reads what the model's head reads."""
        x = vectors[0].float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.norm_eps)
        return (x * self._gain).to(self.dtype)

    def join(self, hidden: Tensor, tokens: Sequence[int]) -> LayerInput:
        residual = self._mtp.join(self.embed(tokens), hidden)
        return LayerInput(residual, self._mtp.layer.attention_norm(residual))

    def finish(self, inputs: LayerInput, mixed: Tensor) -> Tensor:
        layer = self._mtp.layer
        attended = self.attention.project_output(mixed, inputs.normed)
        between = layer.add_attention(inputs.residual, attended)
        hidden: Tensor = self._mtp.norm(layer.add_feed(inputs.residual, between))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the model's output head.

        `LoadedModel.logits` applies the model's final norm first, so that norm is inverted here: up
        to a factor, norm(y / gain) is y.
        """
        if self.device_model is not None:
            return self.device_model.project(hidden.to(self.dtype))
        gain = torch.where(self._gain.abs() < 1e-6, 1e-6, self._gain)
        x = hidden.float() / gain
        scale = (x.pow(2).mean(-1, keepdim=True) + self.model.config.norm_eps).sqrt()
        return torch.from_numpy(self.model.logits(x.cpu().numpy())) * scale.cpu()


def load_mtp(path: Path | None, model: LoadedModel, context: int) -> MtpHead:
    """Load the MTP layer of the model's checkpoint.

    Raises:
        SettingsError: The checkpoint has none.
        ModelFileError: It does not fit the model.
    """
    tensors = None if path is None else open_checkpoint(path).mtp
    if path is None or tensors is None:
        raise SettingsError(
            "speculate='mtp': this checkpoint has no MTP layers (multi-token prediction); use "
            "another drafter: speculate='lookup'"
        )
    return MtpHead(path, tensors, model, context)
