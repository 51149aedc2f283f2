"""Shared by the tests that hold a backend against the plain transformer."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.paged_texts import Library, look
from unspool.backends.step import Backend, Observations, ObserveRequest

# Configurations that no family has, and every backend must support.
ODD_SHAPES: dict[str, dict[str, Any]] = {
    "a window of one": {"windows": (1, 15), "vocab_size": 255},
    "capped": {"attention_softcap": 2.0, "logit_softcap": 3.0, "embedding_scale": 5.0},
    "no positions": {"positions": "none", "rotary": None, "norm": "layer", "qkv_bias": True},
    "relu": {"activation": "relu", "gated": False, "head_bias": True, "ff_bias": True},
    "sums to anything": {
        "experts": 5, "experts_per_token": 3, "expert_width": 21, "normalize_experts": False,
    },
    "sinusoidal": {"positions": "sinusoidal", "rotary": None, "parallel": True, "tied": True},
}  # fmt: skip

Seen = tuple[list[Any], Observations | None]


def difference(a: Any, b: Any) -> float:
    """The largest absolute difference."""
    assert np.shape(a) == np.shape(b)
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def looked_at(backend: Backend, lengths: tuple[int, ...], vocabulary: int, pages: int) -> Seen:
    """Prefill prompts of these lengths in one step, and observe their activations."""
    every = np.arange(sum(lengths))
    taps = ObserveRequest(residuals=every[::3], attention=every[5:], parts=every[::-7].copy())
    library = Library(pages, vocabulary)
    return look(backend, [(library.text(length), length) for length in lengths], taps)


def check_seen(
    model: Seen, reference: Seen, close: float, close_inside: float, sinks: bool = False
) -> None:
    """The same logits and attention within `close`, the same vectors within `close_inside`.

    `sinks`: attention does not sum to one, because a part of it goes nowhere.
    """
    (our_logits, our_inside), (their_logits, their_inside) = model, reference
    assert their_inside is not None and our_inside is not None
    assert np.concatenate(their_logits).std() > 0.2, "logits of a constant model prove nothing"
    assert difference(np.concatenate(our_logits), np.concatenate(their_logits)) < close
    assert difference(our_inside.residuals, their_inside.residuals) < close_inside
    assert difference(our_inside.parts, their_inside.parts) < close_inside
    for our_rows, their_rows in zip(our_inside.attention, their_inside.attention, strict=True):
        assert difference(our_rows, their_rows) < close
        if not sinks:
            assert difference(our_rows.sum(-1), np.ones(our_rows.shape[:2])) < close
