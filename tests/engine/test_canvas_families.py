"""Canvases of the families that are trained to fill them, as their checkpoints are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unspool

families: Any = pytest.importorskip("tiny_masked")
NAMES = [name for name, family in families.FAMILIES.items() if not family.is_bert]
TEXT = [7, 41, 99, 3, 150, 12, 200, 64, 31, 5]


@pytest.mark.parametrize("name", NAMES)
def test_a_canvas_is_computed_as_its_family_does(tmp_path: Path, name: str):
    oracle = families.save(name, tmp_path)
    lm = unspool.load(tmp_path, backend="torch", memory=8 << 20)
    with lm.canvas(TEXT, 14) as canvas:
        canvas.set(2, 17)
        tokens = [*TEXT, *canvas.tokens]
        logits = np.array(canvas.logits())
    expected = oracle(torch.tensor([tokens]))[0].detach().numpy()
    behind = len(TEXT) - lm.config.shifted
    np.testing.assert_allclose(logits, expected[behind : behind + 14], atol=2e-4)
    assert len(lm.diffuse(TEXT, max_tokens=8, threshold=0.1, end=False).tokens) == 8
