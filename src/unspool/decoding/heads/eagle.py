"""EAGLE-3 heads in the format of `speculators`: config.json and safetensors, read as they are.

One decoder layer whose queries, keys and values see two vectors side by side: the embedding of a
token, and what is known of the position before it: the model's vectors before three layers through
`fc`, or, for tokens that are drafted, the head's own output. `d2t` says how far each of the few
tokens it can propose is from the model's own number for it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unspool.backends.base import Loaded
from unspool.backends.step import Floats, Ints
from unspool.decoding.heads import arrays
from unspool.decoding.heads.growing import Node
from unspool.errors import ModelFileError
from unspool.model.config_hf import rotary_of
from unspool.model.safetensors_file import SafetensorsFile

_LAYER = "layers.0."


class EagleHead:
    """An EAGLE-3 head, its weights where the arithmetic is done."""

    def __init__(
        self, folder: Path, told: dict[str, Any], model: Loaded, device: str | None = None
    ) -> None:
        layer: dict[str, Any] = told.get("transformer_layer_config") or {}
        self.name, self._model, self.put = folder.name, model, arrays.on(device)
        self.told = told
        if layer.get("model_type", "llama") not in ("llama", "qwen3"):
            raise ModelFileError(
                f"{folder}: EAGLE-3 heads of a Llama or Qwen3 layer are known here"
            )
        if layer.get("num_hidden_layers", 1) != 1:
            raise ModelFileError(f"{folder}: EAGLE-3 heads of one layer are known here")
        count = model.config.layers
        usual = (2, count // 2, count - 3)
        self.layers: tuple[int, ...] = tuple(told.get("eagle_aux_hidden_state_layer_ids") or usual)
        self._read(folder)
        self.epsilon = float(layer.get("rms_norm_eps", 1e-6))
        self.heads = int(layer["num_attention_heads"])
        self.kv_heads = int(layer.get("num_key_value_heads") or self.heads)
        self.before_residual = bool(told.get("norm_before_residual", False))
        self.width: int = self.weights["fc.weight"].shape[0]
        self.head_width = int(layer.get("head_dim") or self.width // self.heads)
        self._rotary = rotary_of(layer, self.head_width)
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
                ours = name.removeprefix("model.").replace("midlayer.", _LAYER)
                if ours == "d2t":
                    offsets = file.whole_numbers(name).astype(np.int64)
                elif ours != "t2d":
                    self.weights[ours] = self.put(file.stored(name).float32())
        lacking = [name for name in _NEEDED if name not in self.weights]
        if lacking:
            raise ModelFileError(f"{folder}: has no {lacking[0]}; the head is not complete")
        count = self.weights["lm_head.weight"].shape[0]
        self.ids: Ints = np.arange(count)
        if offsets is not None:
            self.ids = self.ids + offsets

    def _check(self, folder: Path) -> None:
        config = self._model.config
        widths = len(self.layers) * config.width, config.width
        if self.weights["fc.weight"].shape[1] != widths[0] or self.width != widths[1]:
            raise ModelFileError(
                f"{folder}: the head was trained for a model {self.width} wide, and this one is "
                f"{config.width} wide; use it with the model that it was trained for"
            )
        if max(self.layers) > config.layers or int(self.ids.max()) >= config.vocab_size:
            raise ModelFileError(
                f"{folder}: the head names a layer or a token that this model does not have; use "
                "it with the model that it was trained for"
            )

    def context(self) -> EagleContext:
        return EagleContext(self)

    def norm(self, x: arrays.Array, name: str) -> arrays.Array:
        return arrays.normed(x, self.weights[name], self.epsilon)

    def times(self, x: arrays.Array, name: str) -> arrays.Array:
        return x @ self.weights[name].swapaxes(0, 1)

    def words(self, tokens: Sequence[int]) -> arrays.Array:
        own = self.weights.get("embed_tokens.weight")
        if own is not None:
            return own[list(tokens)]
        rows = [self._model.rows("embed.weight", token, token + 1)[0] for token in tokens]
        return self.put(np.stack(rows))

    def fused(self, vectors: Floats) -> arrays.Array:
        joined = self.put(arrays.joined(list(vectors), -1))
        if "input_norm.weight" in self.weights:
            joined = self.norm(joined, "input_norm.weight")
        return self.times(joined, "fc.weight")

    def prepared(
        self, hidden: arrays.Array, tokens: Sequence[int], positions: Ints
    ) -> tuple[arrays.Array, ...]:
        """Queries, keys and values of tokens with what is known before them; and the residual."""
        normed = self.norm(hidden, _LAYER + "hidden_norm.weight")
        words = self.norm(self.words(tokens), _LAYER + "input_layernorm.weight")
        both = arrays.joined([words, normed], -1)
        found = []
        for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            at = f"{_LAYER}self_attn.{part}_"
            x = self.times(both, at + "proj.weight")
            x = x + self.weights[at + "proj.bias"] if at + "proj.bias" in self.weights else x
            x = x.reshape(len(positions), heads, self.head_width)
            if at + "norm.weight" in self.weights:
                x = self.norm(x, at + "norm.weight")
            if part != "v":
                cosine, sine = self._rotary.tables(positions, 0)
                x = arrays.turned(x, self.put(cosine), self.put(sine))
            found.append(x)
        return (*found, normed if self.before_residual else hidden)

    def finished(self, gathered: arrays.Array, residual: arrays.Array) -> arrays.Array:
        """The layer's output, from what attention gathered."""
        h = residual + self.times(gathered, _LAYER + "self_attn.o_proj.weight")
        inner = self.norm(h, _LAYER + "post_attention_layernorm.weight")
        gate = arrays.silu(self.times(inner, _LAYER + "mlp.gate_proj.weight"))
        up = self.times(inner, _LAYER + "mlp.up_proj.weight")
        return h + self.times(gate * up, _LAYER + "mlp.down_proj.weight")

    def logits(self, h: arrays.Array) -> Floats:
        found: Floats = arrays.host(self.times(self.norm(h, "norm.weight"), "lm_head.weight"))
        return found


_NEEDED = (
    "fc.weight", "norm.weight", "lm_head.weight",
    *(f"{_LAYER}{name}.weight" for name in (
        "hidden_norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj",
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj",
    )),
)  # fmt: skip


class EagleContext:
    """One text as the head sees it: for each position read, the token behind it has keys."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        empty = head.put(np.zeros((0, head.kv_heads, head.head_width), np.float32))
        self._keys, self._values = empty, empty
        self._fused = head.put(np.zeros((0, head.width), np.float32))

    def __len__(self) -> int:
        return len(self._fused)

    def cut(self, count: int) -> None:
        self._fused = self._fused[:count]
        self._keys, self._values = self._keys[:count], self._values[:count]

    def fork(self, count: int) -> EagleContext:
        other = copy.copy(self)
        other.cut(count)
        return other

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        fused = self._head.fused(vectors)
        _, keys, values, _ = self._head.prepared(fused, following, positions)
        self._fused = arrays.joined([self._fused, fused], 0)
        self._keys = arrays.joined([self._keys, keys], 0)
        self._values = arrays.joined([self._values, values], 0)

    def expand(self, nodes: list[Node], tokens: Sequence[int]) -> Floats:
        """All nodes of one level: each sees the text, the nodes before it, and itself."""
        head, first = self._head, len(tokens) - 2  # a token has the number of what is before it
        states = [
            n.parent.state[0] if n.parent is not None else self._fused[-1] for n in nodes
        ]  # fmt: skip
        hidden = arrays.joined([state[None] for state in states], 0)
        positions = np.array([first + node.depth for node in nodes])
        query, keys, values, residual = head.prepared(
            hidden, [node.token for node in nodes], positions
        )
        gathered = []
        for row, node in enumerate(nodes):
            seen: list[tuple[arrays.Array, arrays.Array]] = []
            if node.parent is not None:  # the text's last token is among what was read
                seen.append((keys[row], values[row]))
            before = node.parent
            while before is not None and before.parent is not None:
                seen.append(before.state[1:])
                before = before.parent
            own_keys = [self._keys, *(key[None] for key, _ in reversed(seen))]
            own_values = [self._values, *(value[None] for _, value in reversed(seen))]
            gathered.append(
                arrays.attended(
                    query[row : row + 1], arrays.joined(own_keys, 0), arrays.joined(own_values, 0)
                )
            )
        h = head.finished(arrays.joined(gathered, 0), residual)
        for row, node in enumerate(nodes):
            node.state = (h[row], keys[row], values[row])
        return head.logits(h)
