"""EAGLE-3 heads in the format of `speculators`: config.json and safetensors.

One decoder layer whose attention reads two concatenated vectors: the embedding of a token, and the
hidden state of the position before it: the model's hidden states before three layers through `fc`,
or, for drafted tokens, the head's own output. `d2t` has the offset from each draft token id to the
model's token id.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unspool.backends.step import Ints, LoadedModel
from unspool.decoding.speculative.head import DraftHead, LayerInput, fuse_norms
from unspool.errors import ModelFileError, SettingsError
from unspool.model.config import ModelConfig
from unspool.model.files.config_json import rope_from_hf
from unspool.model.files.safetensors import SafetensorsFile
from unspool.model.layers.parts import FeedForward, Norm
from unspool.model.layers.transformer import Attention

_LAYER = "layers.0."
_ATTENTION = {
    f"{_LAYER}self_attn.{part}": f"attention.{name}"
    for part, name in (
        ("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out"),
        ("q_norm", "q_norm"), ("k_norm", "k_norm"),
    )
}  # fmt: skip
_NAMES = {  # module in the file -> module of `_EagleLayer`
    **_ATTENTION,
    "fc": "fc",
    "norm": "norm",
    "lm_head": "head",
    "embed_tokens": "embed",
    "input_norm": "input_norm",
    f"{_LAYER}hidden_norm": "hidden_norm",
    f"{_LAYER}input_layernorm": "embed_norm",
    f"{_LAYER}post_attention_layernorm": "feed_norm",
    f"{_LAYER}mlp.gate_proj": "feed.gate",
    f"{_LAYER}mlp.up_proj": "feed.up",
    f"{_LAYER}mlp.down_proj": "feed.down",
}
_OPTIONAL = ("embed_tokens", "input_norm", f"{_LAYER}self_attn.q_norm", f"{_LAYER}self_attn.k_norm")


class _EagleLayer(nn.Module):
    """The modules of a head; the attention reads vectors of twice the width."""

    def __init__(self, config: ModelConfig, num_states: int, weights: dict[str, Tensor]) -> None:
        super().__init__()
        width, shape = config.width, config.shape(0)
        self.fc = nn.Linear(num_states * width, width, bias="fc.bias" in weights)
        self.input_norm = Norm(config, num_states * width, "rms") if (
            "input_norm.weight" in weights
        ) else nn.Identity()  # fmt: skip
        self.hidden_norm, self.embed_norm, self.feed_norm, self.norm = (
            Norm(config, width, "rms") for _ in range(4)
        )
        self.attention = Attention(config, 0)
        for name, rows in (("q", shape.out_width), ("k", shape.kv_width), ("v", shape.kv_width)):
            setattr(self.attention, name, nn.Linear(2 * width, rows, bias=config.qkv_bias))
        self.feed = FeedForward(config, config.ff_width)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        if "embed.weight" in weights:
            self.embed = nn.Embedding(*weights["embed.weight"].shape)


class EagleHead(DraftHead):
    """An EAGLE-3 head."""

    def __init__(self, folder: Path, raw: dict[str, Any], model: LoadedModel) -> None:
        layer: dict[str, Any] = raw.get("transformer_layer_config") or {}
        if layer.get("model_type", "llama") not in ("llama", "qwen3"):
            raise ModelFileError(
                f"{folder}: only EAGLE-3 heads with a Llama or Qwen3 layer are supported"
            )
        if layer.get("num_hidden_layers", 1) != 1:
            raise ModelFileError(f"{folder}: only EAGLE-3 heads with one layer are supported")
        count = model.config.layers
        default_layers = (2, count // 2, count - 3)
        layers = tuple(raw.get("eagle_aux_hidden_state_layer_ids") or default_layers)
        super().__init__(folder.name, model, layers)
        weights = self._read(folder)
        self._check(folder, weights)
        self.ids = self.ids.to(self.device)
        config = _layer_config(layer, weights)
        self.rotary = rope_from_hf(layer, config.head_width)
        self.before_residual = bool(raw.get("norm_before_residual", False))
        with torch.device("meta"):
            self._layer = _EagleLayer(config, len(layers), weights)
        try:
            self._layer.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            problem = str(error).splitlines()[-1].strip()
            raise ModelFileError(f"{folder}: weights and config.json do not fit: {problem}") from (
                error
            )
        self._layer.requires_grad_(False)
        fuse_norms(self._layer)
        self.attention = self._layer.attention

    def _read(self, folder: Path) -> dict[str, Tensor]:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelFileError(f"{folder}: has no weights (model.safetensors)")
        weights: dict[str, Tensor] = {}
        offsets: Ints | None = None
        for path in files:
            file = SafetensorsFile(path)
            for name in file.tensors:
                key = name.removeprefix("model.").replace("midlayer.", _LAYER)
                module, _, kind = key.rpartition(".")
                if key == "d2t":
                    offsets = file.integers(name).astype(np.int64)
                elif module in _NAMES:
                    tensor = self.to_tensor(file.stored(name).float32())
                    weights[f"{_NAMES[module]}.{kind}"] = tensor
        missing = [
            name for name, module in _NAMES.items()
            if f"{module}.weight" not in weights and name not in _OPTIONAL
        ]  # fmt: skip
        if missing:
            raise ModelFileError(f"{folder}: has no {missing[0]}.weight; the head is incomplete")
        ids: Ints = np.arange(len(weights["head.weight"]))
        if offsets is not None:
            ids = ids + offsets
        self.ids = torch.from_numpy(ids.astype(np.int32))
        return weights

    def _check(self, folder: Path, weights: dict[str, Tensor]) -> None:
        config, shape = self.model.config, tuple(weights["fc.weight"].shape)
        if shape != (config.width, len(self.layers) * config.width):
            raise ModelFileError(
                f"{folder}: the head was trained for hidden size {shape[0]}, and this model has "
                f"{config.width}; use it with the model that it was trained for"
            )
        if max(self.layers) > config.layers or int(self.ids.max()) >= config.vocab_size:
            raise ModelFileError(
                f"{folder}: the head uses a layer or a token that this model does not have; use it "
                "with the model that it was trained for"
            )

    def embed(self, tokens: Tensor) -> Tensor:
        if hasattr(self._layer, "embed"):
            embedded: Tensor = self._layer.embed(tokens)
            return embedded
        return super().embed(tokens)

    def read_hidden(self, vectors: Tensor) -> Tensor:
        joined = vectors.transpose(0, 1).flatten(1)
        fused: Tensor = self._layer.fc(self._layer.input_norm(joined))
        return fused

    def join(self, hidden: Tensor, tokens: Tensor) -> LayerInput:
        normed = self._layer.hidden_norm(hidden)
        embedded = self._layer.embed_norm(self.embed(tokens))
        residual = normed if self.before_residual else hidden
        return LayerInput(residual, torch.cat((embedded, normed), -1))

    def finish(self, inputs: LayerInput, mixed: Tensor) -> Tensor:
        between = inputs.residual + self.attention.out(mixed)
        hidden: Tensor = between + self._layer.feed(self._layer.feed_norm(between))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._layer.head(self._layer.norm(hidden))
        return logits


def _layer_config(layer: dict[str, Any], weights: dict[str, Tensor]) -> ModelConfig:
    width, heads = weights["fc.weight"].shape[0], int(layer["num_attention_heads"])
    head_width = int(layer.get("head_dim") or width // heads)
    return ModelConfig(
        family="eagle3",
        vocab_size=len(weights["head.weight"]),
        width=width,
        layers=1,
        heads=heads,
        kv_heads=int(layer.get("num_key_value_heads") or heads),
        head_width=head_width,
        ff_width=len(weights["feed.gate.weight"]),
        context=int(layer.get("max_position_embeddings") or 2048),
        norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        rotary=rope_from_hf(layer, head_width),
        qk_norm="head" if "attention.q_norm.weight" in weights else "none",
        qkv_bias="attention.q.bias" in weights,
        out_bias="attention.out.bias" in weights,
        tied=True,
    )


def load_eagle(folder: Path, model: LoadedModel) -> EagleHead:
    """Load the head in a folder."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"{folder} is not an EAGLE-3 head: it has no config.json; give the folder of one"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read ({error})") from error
    if not isinstance(raw, dict) or raw.get("speculators_model_type") != "eagle3":
        raise ModelFileError(
            f"{folder}: config.json has an unknown format; supported are EAGLE-3 heads in the "
            "format of speculators"
        )
    return EagleHead(folder, raw, model)
