"""Where a token stands: the three ways a transformer is told the order of its tokens.

A transformer without positions sees a bag of tokens. Either a vector for the position is added
to the embedding (`sinusoidal`: fixed waves, the original transformer; learned: a table that is
simply another weight), or queries and keys are turned by an angle that grows with the position
(`Rotary`), so that their dot product depends on the distance between them.

Turning more slowly lets a model read further than it was trained to; the ways to do that are the
scalings. Everything here is numpy: the torch model and native backends use the same tables.
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
    """The original transformer's vectors: sine on even places, cosine on odd ones."""
    waves = 1.0 / 10000.0 ** (np.arange(0, width, 2) / width)
    angles = positions[:, None] * waves[None, :]
    table = np.zeros((len(positions), width), np.float32)
    table[:, 0::2] = np.sin(angles)
    table[:, 1::2] = np.cos(angles)[:, : width // 2]
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """How one model turns its queries and keys."""

    width: int  # how many of a head's numbers are turned; the rest pass through
    base: float = 10000.0
    scaling: Scaling = "none"
    factor: float = 1.0  # how many times further than `original_context` to read
    original_context: int = 0  # the length the model was first trained on
    attention_factor: float = 1.0  # cosine and sine are multiplied by this
    low_frequency: float = 1.0  # llama3: waves longer than original/low are slowed fully
    high_frequency: float = 4.0  # llama3: waves shorter than original/high are left alone
    beta_fast: float = 32.0  # yarn: dimensions that turn more often than this are left alone
    beta_slow: float = 1.0  # yarn: dimensions that turn less often than this are slowed fully
    whole_dimensions: bool = True  # yarn: round the two borders to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope, or factors a file gives as they are
    long_factors: tuple[float, ...] = ()  # longrope, for texts beyond the original context
    share: float = 1.0  # proportional: the part of the pairs that turn at all; the slowest do not

    def __post_init__(self) -> None:
        if self.scaling == "dynamic" and self.width <= 2:
            raise ModelFileError(
                f"dynamic rope scaling needs heads that turn more than 2 numbers, got {self.width}"
            )

    @property
    def has_two_ranges(self) -> bool:
        """Whether texts beyond the original context need other factors than shorter ones."""
        return self.scaling == "longrope" and self.short_factors != self.long_factors

    def frequencies(self, length: int) -> Floats:
        """Radians a token, for each pair of numbers, where texts may be `length` tokens long.

        Only `dynamic` and `longrope` look at the length. In an engine it is the context that was
        asked for, the same for all texts, not the length of a text so far: otherwise keys in the
        cache would be turned differently from those of a fresh run, and texts that begin alike
        could not share them.
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
        """NTK: a larger base slows the slow dimensions and leaves the fast ones alone."""
        beyond = max(length, self.original_context) / self.original_context
        stretch = (self.factor * beyond - (self.factor - 1)) ** (self.width / (self.width - 2))
        return np.float32(self.base * stretch)

    def _yarn(self, plain: Floats) -> Floats:
        """Between two dimensions, blend from left alone to slowed by the factor."""

        def dimension_turning(times: float) -> float:
            per_turn = self.original_context / (times * 2 * math.pi)
            return self.width * math.log(per_turn) / (2 * math.log(self.base))

        low, high = dimension_turning(self.beta_fast), dimension_turning(self.beta_slow)
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
        """As Llama 3.1: long waves slowed, short ones left alone, a smooth blend between."""
        waves = 2 * math.pi / plain
        keep = (self.original_context / waves - self.low_frequency) / (
            self.high_frequency - self.low_frequency
        )
        keep = np.clip(keep, 0, 1)
        return ((1 - keep) * plain / self.factor + keep * plain).astype(np.float32)
