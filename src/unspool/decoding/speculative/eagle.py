"""EAGLE-3 heads in the format of `speculators`: config.json and safetensors.

One decoder layer whose input is two concatenated vectors: the embedding of a token, and the state
of the position before it: the model's hidden states before three layers through `fc`, or, for
drafted tokens, the head's own output. `d2t` has the offset from each draft token id to the model's
token id.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unspool.backends.step import Floats, Ints, LoadedModel
from unspool.decoding.speculative import arrays
from unspool.decoding.speculative.head import DraftNode
from unspool.errors import ModelFileError
from unspool.model.files.config_json import rope_from_hf
from unspool.model.files.safetensors import SafetensorsFile

_LAYER = "layers.0."


class EagleHead:
    """An EAGLE-3 head with its weights in numpy or on a torch device."""

    def __init__(
        self, folder: Path, config: dict[str, Any], model: LoadedModel, device: str | None = None
    ) -> None:
        layer: dict[str, Any] = config.get("transformer_layer_config") or {}
        self.name, self._model, self.to_device = folder.name, model, arrays.to_device(device)
        if layer.get("model_type", "llama") not in ("llama", "qwen3"):
            raise ModelFileError(
                f"{folder}: only EAGLE-3 heads with a Llama or Qwen3 layer are supported"
            )
        if layer.get("num_hidden_layers", 1) != 1:
            raise ModelFileError(f"{folder}: only EAGLE-3 heads with one layer are supported")
        count = model.config.layers
        default_layers = (2, count // 2, count - 3)
        self.layers: tuple[int, ...] = tuple(
            config.get("eagle_aux_hidden_state_layer_ids") or default_layers
        )
        self._read(folder)
        self.epsilon = float(layer.get("rms_norm_eps", 1e-6))
        self.heads = int(layer["num_attention_heads"])
        self.kv_heads = int(layer.get("num_key_value_heads") or self.heads)
        self.before_residual = bool(config.get("norm_before_residual", False))
        self.width: int = self.weights["fc.weight"].shape[0]
        self.head_width = int(layer.get("head_dim") or self.width // self.heads)
        self._rotary = rope_from_hf(layer, self.head_width)
        self._check(folder)

    def _read(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelFileError(f"{folder}: has no weights (model.safetensors)")
        self.weights: dict[str, Any] = {}
        offsets: Ints | None = None
        for path in files:
            file = SafetensorsFile(path)
            for name in file.tensors:
                key = name.removeprefix("model.").replace("midlayer.", _LAYER)
                if key == "d2t":
                    offsets = file.integers(name).astype(np.int64)
                elif key != "t2d":
                    self.weights[key] = self.to_device(file.stored(name).float32())
        missing = [name for name in _NEEDED if name not in self.weights]
        if missing:
            raise ModelFileError(f"{folder}: has no {missing[0]}; the head is incomplete")
        count = self.weights["lm_head.weight"].shape[0]
        self.ids: Ints = np.arange(count)
        if offsets is not None:
            self.ids = self.ids + offsets

    def _check(self, folder: Path) -> None:
        config = self._model.config
        widths = len(self.layers) * config.width, config.width
        if self.weights["fc.weight"].shape[1] != widths[0] or self.width != widths[1]:
            raise ModelFileError(
                f"{folder}: the head was trained for hidden size {self.width}, and this model has "
                f"{config.width}; use it with the model that it was trained for"
            )
        if max(self.layers) > config.layers or int(self.ids.max()) >= config.vocab_size:
            raise ModelFileError(
                f"{folder}: the head uses a layer or a token that this model does not have; use it "
                "with the model that it was trained for"
            )

    def context(self) -> EagleContext:
        return EagleContext(self)

    def norm(self, x: arrays.Array, name: str) -> arrays.Array:
        return arrays.rms_norm(x, self.weights[name], self.epsilon)

    def linear(self, x: arrays.Array, name: str) -> arrays.Array:
        return x @ self.weights[name].swapaxes(0, 1)

    def embed(self, tokens: Sequence[int]) -> arrays.Array:
        embedding = self.weights.get("embed_tokens.weight")
        if embedding is not None:
            return embedding[list(tokens)]
        rows = [self._model.rows("embed.weight", token, token + 1)[0] for token in tokens]
        return self.to_device(np.stack(rows))

    def fuse(self, vectors: Floats) -> arrays.Array:
        joined = self.to_device(arrays.concat(list(vectors), -1))
        if "input_norm.weight" in self.weights:
            joined = self.norm(joined, "input_norm.weight")
        return self.linear(joined, "fc.weight")

    def project(
        self, hidden: arrays.Array, tokens: Sequence[int], positions: Ints
    ) -> tuple[arrays.Array, ...]:
        """Queries, keys and values of tokens given the states before them, and the residual."""
        normed = self.norm(hidden, _LAYER + "hidden_norm.weight")
        words = self.norm(self.embed(tokens), _LAYER + "input_layernorm.weight")
        inputs = arrays.concat([words, normed], -1)
        projections = []
        for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            prefix = f"{_LAYER}self_attn.{part}_"
            x = self.linear(inputs, prefix + "proj.weight")
            x = (
                x + self.weights[prefix + "proj.bias"]
                if prefix + "proj.bias" in self.weights
                else x
            )
            x = x.reshape(len(positions), heads, self.head_width)
            if prefix + "norm.weight" in self.weights:
                x = self.norm(x, prefix + "norm.weight")
            if part != "v":
                cosine, sine = self._rotary.tables(positions, 0)
                x = arrays.apply_rope(x, self.to_device(cosine), self.to_device(sine))
            projections.append(x)
        return (*projections, normed if self.before_residual else hidden)

    def finish_layer(self, gathered: arrays.Array, residual: arrays.Array) -> arrays.Array:
        """Output of the layer, from the attention output."""
        h = residual + self.linear(gathered, _LAYER + "self_attn.o_proj.weight")
        inner = self.norm(h, _LAYER + "post_attention_layernorm.weight")
        gate = arrays.silu(self.linear(inner, _LAYER + "mlp.gate_proj.weight"))
        up = self.linear(inner, _LAYER + "mlp.up_proj.weight")
        return h + self.linear(gate * up, _LAYER + "mlp.down_proj.weight")

    def logits(self, h: arrays.Array) -> Floats:
        logits: Floats = arrays.to_host(self.linear(self.norm(h, "norm.weight"), "lm_head.weight"))
        return logits


_NEEDED = (
    "fc.weight", "norm.weight", "lm_head.weight",
    *(f"{_LAYER}{name}.weight" for name in (
        "hidden_norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj",
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj",
    )),
)  # fmt: skip


class EagleContext:
    """The state of the head for one text: a key and value per token read."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        empty = head.to_device(np.zeros((0, head.kv_heads, head.head_width), np.float32))
        self._keys, self._values = empty, empty
        self._fused = head.to_device(np.zeros((0, head.width), np.float32))

    def __len__(self) -> int:
        return len(self._fused)

    def truncate(self, count: int) -> None:
        self._fused = self._fused[:count]
        self._keys, self._values = self._keys[:count], self._values[:count]

    def fork(self, count: int) -> EagleContext:
        other = copy.copy(self)
        other.truncate(count)
        return other

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        fused = self._head.fuse(vectors)
        _, keys, values, _ = self._head.project(fused, following, positions)
        self._fused = arrays.concat([self._fused, fused], 0)
        self._keys = arrays.concat([self._keys, keys], 0)
        self._values = arrays.concat([self._values, values], 0)

    def expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Floats:
        """Expand the nodes of one level: each attends to the text, its ancestors and itself."""
        head, first = self._head, len(tokens) - 2  # a token has the position of the one before it
        states = [
            n.parent.state[0] if n.parent is not None else self._fused[-1] for n in nodes
        ]  # fmt: skip
        hidden = arrays.concat([state[None] for state in states], 0)
        positions = np.array([first + node.depth for node in nodes])
        query, keys, values, residual = head.project(
            hidden, [node.token for node in nodes], positions
        )
        gathered = []
        for row, node in enumerate(nodes):
            path_kv: list[tuple[arrays.Array, arrays.Array]] = []
            if node.parent is not None:  # the last token of the text has been read
                path_kv.append((keys[row], values[row]))
            ancestor = node.parent
            while ancestor is not None and ancestor.parent is not None:
                path_kv.append(ancestor.state[1:])
                ancestor = ancestor.parent
            row_keys = [self._keys, *(key[None] for key, _ in reversed(path_kv))]
            row_values = [self._values, *(value[None] for _, value in reversed(path_kv))]
            gathered.append(
                arrays.attention(
                    query[row : row + 1], arrays.concat(row_keys, 0), arrays.concat(row_values, 0)
                )
            )
        h = head.finish_layer(arrays.concat(gathered, 0), residual)
        for row, node in enumerate(nodes):
            node.state = (h[row], keys[row], values[row])
        return head.logits(h)
