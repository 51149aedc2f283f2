"""Position encodings: sinusoidal vectors, and RoPE with its context-extension scalings.

Everything here is numpy: the torch model and the native backends use the same tables. (Learned
positions are a weight like any other.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError

Floats = npt.NDArray[np.float32]
Scaling = Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
SCALINGS: tuple[str, ...] = get_args(Scaling)


def sinusoidal(positions: npt.NDArray[np.int64], width: int) -> Floats:
    """Position vectors of the original transformer: sine at even indices, cosine at odd ones."""
    waves = 1.0 / 10000.0 ** (np.arange(0, width, 2) / width)
    angles = positions[:, None] * waves[None, :]
    table = np.zeros((len(positions), width), np.float32)
    table[:, 0::2] = np.sin(angles)
    table[:, 1::2] = np.cos(angles)[:, : width // 2]
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """RoPE settings. Field names are written to config.json."""

    width: int  # rotated dimensions of a head; the others pass through
    base: float = 10000.0  # rope_theta
    scaling: Scaling = "none"
    factor: float = 1.0  # context extension over `original_context`
    original_context: int = 0  # context length of the original training
    attention_factor: float = 1.0  # multiplies cosine and sine
    low_frequency: float = 1.0  # llama3: wavelengths above original / low are scaled fully
    high_frequency: float = 4.0  # llama3: wavelengths below original / high are not scaled
    beta_fast: float = 32.0  # yarn: dimensions with more rotations than this are not scaled
    beta_slow: float = 1.0  # yarn: dimensions with fewer rotations than this are scaled fully
    whole_dimensions: bool = True  # yarn: round the two borders to integer dimensions
    short_factors: tuple[float, ...] = ()  # longrope, or explicit factors of a file
    long_factors: tuple[float, ...] = ()  # longrope: used beyond the original context
    share: float = 1.0  # proportional: fraction of the pairs that are rotated; the fastest ones

    def __post_init__(self) -> None:
        if self.scaling == "dynamic" and self.width <= 2:
            raise ModelFileError(
                f"dynamic RoPE scaling needs more than 2 rotated dimensions, got {self.width}"
            )

    @property
    def has_two_ranges(self) -> bool:
        """Whether sequences beyond the original context use other factors than shorter ones."""
        return self.scaling == "longrope" and self.short_factors != self.long_factors

    def frequencies(self, length: int) -> Floats:
        """Radians per position, for each pair of dimensions.

        Args:
            length: The maximum sequence length; only `dynamic` and `longrope` depend on it. In an
                engine it is the configured context, the same for all sequences, not the current
                length: otherwise cached keys would differ from those of a fresh run, and sequences
                with a common prefix could not share them.
        """
        exponents = np.arange(0, self.width, 2, dtype=np.float32) / np.float32(self.width)
        if self.scaling == "dynamic":
            return (1.0 / self._stretched_base(length) ** exponents).astype(np.float32)
        plain = (1.0 / np.float32(self.base) ** exponents).astype(np.float32)
        if self.scaling == "linear":
            return (plain / np.float32(self.factor)).astype(np.float32)
        if self.scaling == "yarn":
            return self._yarn(plain)
        if self.scaling == "llama3":
            return self._llama3(plain)
        if self.scaling == "longrope":
            beyond = self.original_context and length > self.original_context
            factors = self.long_factors if beyond else self.short_factors
            return (plain / np.array(factors, np.float32)).astype(np.float32)
        if self.scaling == "proportional":
            plain[int(self.share * self.width // 2) :] = 0
            return (plain / np.float32(self.factor)).astype(np.float32)
        return plain

    def tables(self, positions: npt.NDArray[np.int64], length: int) -> tuple[Floats, Floats]:
        """Cosine and sine for each position, `width / 2` numbers each."""
        angles = positions.astype(np.float32)[:, None] * self.frequencies(length)[None, :]
        scale = np.float32(self.attention_factor)
        return np.cos(angles) * scale, np.sin(angles) * scale

    def _stretched_base(self, length: int) -> np.float32:
        """NTK scaling: a larger base lowers the low frequencies and keeps the high ones."""
        beyond = max(length, self.original_context) / self.original_context
        stretch = (self.factor * beyond - (self.factor - 1)) ** (self.width / (self.width - 2))
        return np.float32(self.base * stretch)

    def _yarn(self, plain: Floats) -> Floats:
        """Blend between two dimensions, from unscaled to divided by the factor."""

        def dimension_of(rotations: float) -> float:
            wavelength = self.original_context / (rotations * 2 * math.pi)
            return self.width * math.log(wavelength) / (2 * math.log(self.base))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.whole_dimensions:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.width - 1)
        if low == high:
            high += 0.001
        dimensions = np.arange(len(plain), dtype=np.float32)
        slowed = np.clip((dimensions - low) / (high - low), 0, 1)
        blended: Floats = (plain / self.factor * slowed + plain * (1 - slowed)).astype(np.float32)
        return blended

    def _llama3(self, plain: Floats) -> Floats:
        """Llama 3.1: scale long wavelengths, keep short ones, blend in between."""
        waves = 2 * math.pi / plain
        keep = (self.original_context / waves - self.low_frequency) / (
            self.high_frequency - self.low_frequency
        )
        keep = np.clip(keep, 0, 1)
        return ((1 - keep) * plain / self.factor + keep * plain).astype(np.float32)
