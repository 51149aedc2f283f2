"""The multi-token prediction layer of the model's checkpoint as a drafting head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from unspool.backends.step import LoadedModel
from unspool.decoding.speculative.head import DraftHead, LayerInput, fuse_norms
from unspool.errors import ModelFileError, SettingsError
from unspool.model.files.checkpoint import open_checkpoint
from unspool.model.files.mtp import MtpTensors
from unspool.model.layers.mtp import MtpLayer
from unspool.model.layers.parts import FeedForward


class MtpHead(DraftHead):
    """An MTP layer with its weights; embeddings and output head are the model's."""

    def __init__(self, path: Path, tensors: MtpTensors, model: LoadedModel, context: int) -> None:
        config = tensors.config
        if config.norm != "rms" or config.rotary is None:
            raise ModelFileError(f"{path}: MTP layers need RMSNorm and RoPE")
        super().__init__(path.name, model, (model.config.layers,), context)
        self.rotary = config.rotary
        self.ids = torch.arange(config.vocab_size, dtype=torch.int32, device=self.device)
        with torch.device("meta"):
            self._mtp = MtpLayer(config)
        try:
            state = {name: self.to_tensor(stored.float32()) for name, stored in tensors.weights()}
        except ModelFileError as error:
            raise ModelFileError(f"{path}: {error}") from error
        self._mtp.load_state_dict(state, assign=True)
        self._mtp.requires_grad_(False)
        fuse_norms(self._mtp)
        self.attention = self._mtp.layer.attention
        # What experts compute depends on the tokens.
        self.has_fixed_shapes = isinstance(self._mtp.layer.feed, FeedForward)
        gain = model.vector("norm.weight")
        assert gain is not None, "the model has an RMSNorm before its head"
        self._gain = self.to_tensor(gain)

    def read_hidden(self, vectors: Tensor) -> Tensor:
        """Apply the model's final norm: the layer reads what the model's head reads."""
        eps = self.model.config.norm_eps
        return functional.rms_norm(vectors[0], self._gain.shape, self._gain, eps)

    def join(self, hidden: Tensor, tokens: Tensor) -> LayerInput:
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
        gain = self._gain.float()
        gain = torch.where(gain.abs() < 1e-6, 1e-6, gain)
        x = hidden.float() / gain
        scale = (x.pow(2).mean(-1, keepdim=True) + self.model.config.norm_eps).sqrt()
        return torch.from_numpy(self.model.logits(x.cpu().numpy())).to(self.device) * scale


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
