"""A text as one vector, on every backend and in pieces."""

from __future__ import annotations

import numpy as np

from unspool.lens.activations import get_activations
from unspool.lens.embeddings import embedding


def test_the_mean_of_the_final_vectors(tiny_lm, monkeypatch):
    from unspool.lens import embeddings as module

    monkeypatch.setattr(module, "_CHUNK_TOKENS", 32)
    ids = [(7 * n) % 50 + 1 for n in range(100)]  # more than one chunk
    result = embedding(tiny_lm, ids)
    final = [
        tiny_lm.model.normed(get_activations(tiny_lm, ids, n).residuals[-1][None])[0]
        for n in range(100)
    ]
    mean = np.mean(final, axis=0, dtype=np.float64)
    assert np.allclose(result, mean / np.linalg.norm(mean), atol=1e-5)
    assert abs(np.linalg.norm(result) - 1) < 1e-6


def test_near_texts_are_near(lm):
    branch, near, far = (
        embedding(lm, text) for text in ("A small dog", "A little dog", "x = 3 * (y - 1)")
    )
    assert branch @ near > branch @ far


def test_a_look_for_vectors_alone_beside_a_whole_one(tiny_lm):
    """In one batch, each gets what it asked for."""
    engine = tiny_lm.engine
    with tiny_lm.open_branch([1, 2, 3]) as branch, tiny_lm.open_branch([1, 2, 4]) as other:
        (shallow,) = engine.look(branch, at=frozenset({0, 1, 2}), deep=False).inside
        (deep,) = engine.look(other, at=frozenset({1, 2})).inside
    assert shallow.residuals.shape[1] == 3 and not shallow.attention
    assert deep.residuals.shape[1] == 2 and len(deep.attention) == 2
    assert np.allclose(shallow.residuals[:, 1], deep.residuals[:, 0], rtol=1e-4, atol=1e-5)
