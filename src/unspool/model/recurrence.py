"""Layers that carry a state from token to token instead of looking back at keys and values.

What such a layer remembers of a text has one size, however long the text is: the last inputs of a
short convolution, and (gated DeltaNet, Mamba-2) a matrix for each head. One state of a whole text
is all of its layers' states one behind the other, in 32 bits: `ModelConfig.state_floats(layer)`
says how many numbers a layer has, `ModelConfig.state_starts` where each begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from unspool.errors import ModelFileError

STATELESS = ("attention", "none")
MIXERS = (*STATELESS, "conv", "delta", "mamba2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The shape of a model's recurrent layers; all of them are alike."""

    conv_kernel: int  # tokens that the convolution sees, the one at hand among them
    conv_bias: bool = False
    # Gated DeltaNet: what is written is found again by a key, as in attention. What Mamba-2 calls
    # B, C and x are keys, queries and values too, and its groups are key heads.
    key_heads: int = 0
    value_heads: int = 0  # several of them may share a key head
    key_width: int = 0
    value_width: int = 0
    # Which value heads share key head k: every `key_heads`th (as GGUF files have them), or
    # neighbours (as transformers has them).
    tiled: bool = False
    norm_groups: int = 1  # Mamba-2: into how many parts its norm divides what was read

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        return self.value_heads * self.value_width

    def channels(self, mixer: str, width: int) -> int:
        """Numbers of a token that the convolution runs over."""
        return width if mixer == "conv" else 2 * self.keys + self.values

    def conv_floats(self, mixer: str, width: int) -> int:
        return (self.conv_kernel - 1) * self.channels(mixer, width)

    def state_floats(self, mixer: str, width: int) -> int:
        """Numbers of one layer's state: the convolution's last inputs, then the heads' matrices."""
        if mixer in STATELESS:
            return 0
        matrices = self.value_heads * self.key_width * self.value_width
        return self.conv_floats(mixer, width) + (matrices if mixer != "conv" else 0)

    def key_head(self, value_head: int) -> int:
        """Whose key a value head is written and read with."""
        if self.tiled:
            return value_head % self.key_heads
        return value_head // (self.value_heads // self.key_heads)


def check_mixers(mixers: tuple[str, ...], recurrence: Recurrence | None, layers: int) -> None:
    """Refuse settings that make no sense, in a sentence."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ModelFileError(f"the model's settings make no sense: {what}")

    need(len(mixers) in (0, layers), f"mixers names {len(mixers)} layers, and there are {layers}")
    unknown = sorted(set(mixers) - set(MIXERS))
    need(not unknown, f"mixers may be {', '.join(MIXERS)}, not {', '.join(unknown)}")
    if not set(mixers) - set(STATELESS):
        return
    if recurrence is None:
        raise ModelFileError("the model's settings make no sense: recurrence is missing")
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
        need(groups >= 1 and recurrence.values % groups == 0, "norm_groups must divide the values")
