"""Settings of recurrent layers, which carry a state from token to token instead of a KV cache.

The state has a constant size: the last inputs of a short convolution, and (gated DeltaNet, Mamba-2)
a matrix for each head. The state of a sequence is the concatenation of its layers' states in
float32: `ModelConfig.state_floats(layer)` is a layer's size, `ModelConfig.state_starts` its offset.
"""

from __future__ import annotations

from dataclasses import dataclass

from unspool.errors import ModelFileError

STATELESS = ("attention", "none")
MIXERS = (*STATELESS, "conv", "delta", "mamba2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Sizes of a model's recurrent layers, the same in all of them."""

    conv_kernel: int  # kernel size of the convolution in tokens, the current one included
    conv_bias: bool = False
    # Gated DeltaNet has keys, queries and values as attention does. Mamba-2's B, C and x are called
    # keys, queries and values here, its groups key heads.
    key_heads: int = 0
    value_heads: int = 0  # several of them may share a key head
    key_width: int = 0
    value_width: int = 0
    # Which value heads share a key head: every `key_heads`-th one (the order of GGUF files), or
    # adjacent ones (the order of transformers).
    tiled: bool = False
    norm_groups: int = 1  # Mamba-2: number of groups of its gated norm

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.key_width

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.value_width

    def channels(self, mixer: str, width: int) -> int:
        """Number of convolution channels."""
        return width if mixer == "conv" else 2 * self.key_dim + self.value_dim

    def conv_floats(self, mixer: str, width: int) -> int:
        return (self.conv_kernel - 1) * self.channels(mixer, width)

    def state_floats(self, mixer: str, width: int) -> int:
        """Floats of one layer's state: the convolution's last inputs, then the heads' matrices."""
        if mixer in STATELESS:
            return 0
        matrices = self.value_heads * self.key_width * self.value_width
        return self.conv_floats(mixer, width) + (matrices if mixer != "conv" else 0)

    def key_head(self, value_head: int) -> int:
        """The key head that a value head uses."""
        if self.tiled:
            return value_head % self.key_heads
        return value_head // (self.value_heads // self.key_heads)


def check_mixers(mixers: tuple[str, ...], recurrence: Recurrence | None, layers: int) -> None:
    """Raise if mixers and recurrence are invalid or do not fit together."""

    def need(condition: bool, problem: str) -> None:
        if not condition:
            raise ModelFileError(f"invalid model settings: {problem}")

    need(len(mixers) in (0, layers), f"mixers has {len(mixers)} entries for {layers} layers")
    unknown = sorted(set(mixers) - set(MIXERS))
    need(not unknown, f"mixers must be {', '.join(MIXERS)}, got {', '.join(unknown)}")
    if not set(mixers) - set(STATELESS):
        return
    if recurrence is None:
        raise ModelFileError("invalid model settings: recurrence is missing")
    need(2 <= recurrence.conv_kernel <= 64, "conv_kernel must be 2 to 64")
    if {"delta", "mamba2"} & set(mixers):
        sizes = (
            recurrence.key_heads, recurrence.value_heads,
            recurrence.key_width, recurrence.value_width,
        )  # fmt: skip
        need(all(1 <= size <= 100_000 for size in sizes), "heads and widths must be 1 to 100,000")
        divides = recurrence.value_heads % recurrence.key_heads == 0
        need(divides, "value_heads must be a multiple of key_heads")
        groups = recurrence.norm_groups
        need(
            groups >= 1 and recurrence.value_dim % groups == 0, "norm_groups must divide the values"
        )
