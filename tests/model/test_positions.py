"""Positions against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unspool.model.config import Rotary, sinusoidal
from unspool.model.layers.parts import apply_rope


def test_sinusoidal_is_the_papers_formula():
    table = sinusoidal(np.arange(50), 16)
    for position in (0, 1, 7, 49):
        for pair in range(8):
            angle = position / 10000 ** (2 * pair / 16)
            assert table[position, 2 * pair] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * pair + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_rotary_depends_only_on_the_distance():
    rotary = Rotary(width=8)
    query, key = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))

    def product(at: int, other: int) -> float:
        tables = [rotary.tables(np.array([p]), 200) for p in (at, other)]
        turned = [
            apply_rope(x, torch.from_numpy(c), torch.from_numpy(s))
            for x, (c, s) in zip((query, key), tables, strict=True)
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_turning_keeps_the_length_and_leaves_the_rest_alone():
    rotary = Rotary(width=4)
    cosine, sine = (torch.from_numpy(t) for t in rotary.tables(np.array([3]), 10))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    turned = apply_rope(x, cosine, sine)
    assert torch.equal(turned[:, 4:], x[:, 4:])
    assert turned.norm() == pytest.approx(float(x.norm()), rel=1e-6)
    first = x[0, 0] * math.cos(3) - x[0, 2] * math.sin(3)
    assert turned[0, 0] == pytest.approx(float(first), rel=1e-5)


def test_scalings_slow_what_they_should():
    plain = Rotary(width=64, base=10000.0).frequencies(8192)
    linear = Rotary(width=64, scaling="linear", factor=4.0).frequencies(8192)
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
    for scaling in ("yarn", "llama3"):
        scaled = Rotary(
            width=64,
            scaling=scaling,
            factor=4.0,
            original_context=2048,  # type: ignore[arg-type]
        ).frequencies(8192)
        ratio = plain / scaled
        assert ratio[0] == pytest.approx(1.0), "the fastest pair is left alone"
        assert ratio[-1] == pytest.approx(4.0), "the slowest is slowed fully"
        assert (np.diff(ratio) >= -1e-5).all(), "and in between it only grows"
    dynamic = Rotary(width=64, scaling="dynamic", factor=4.0, original_context=2048)
    np.testing.assert_allclose(dynamic.frequencies(2048), plain, rtol=1e-6)
    assert dynamic.frequencies(8192)[-1] < plain[-1] / 4
