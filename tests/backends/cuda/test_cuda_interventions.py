"""Interventions and readings on the GPU backend, by Triton's interpreter: the numbers of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.cuda_support import backend, cuda_model, language_model, torch_model
from helpers.intervention_support import (
    STEERED_MODELS,
    check_changes_and_readings,
    random_op,
    run_steered,
)
from helpers.paged_texts import RandomCheckpoint, config
from helpers.parity import difference
from unspool.backends.cuda import interventions as on_gpu
from unspool.backends.interventions import Add, Intervention

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(STEERED_MODELS)],
)
def test_changes_and_readings_are_those_of_torch(name: str):
    check_changes_and_readings(name, torch_model, cuda_model)


def test_rows_are_those_of_the_row_alone_and_vectors_make_room(monkeypatch: pytest.MonkeyPatch):
    """A pool that holds few numbers: it drops the vectors of earlier steps, and grows."""
    monkeypatch.setattr(on_gpu, "_POOL_FLOATS", 8)
    shape = config(layers=1, context=128)
    running: Any = backend(cuda_model(RandomCheckpoint(shape), exact=True))
    rng, vector = np.random.default_rng(1), np.ones(shape.width)
    ops = [random_op(kind, shape.width, rng) for kind in ("clamp_feature", "project_out")]
    changes = [
        tuple(Intervention("resid_post", op, 0) for op in ops),
        (Intervention("mlp_out", Add(vector), 0), Intervention("resid_post", Add(vector), 0)),
    ]
    alone = [
        run_steered(running, [2, 2], [changes[n] if n == number else () for n in range(2)])[0]
        for number in range(2)
    ]
    together = run_steered(running, [2, 2], changes)[0]
    assert np.array_equal(together, np.concatenate((alone[0][:2], alone[1][2:])))
    plain = run_steered(running, [2, 2], [(), ()])[0]
    assert difference(together, plain) > 0.01, "nothing is changed"
    assert running._vectors.num_resets >= 1


def test_texts_with_interventions_through_the_engine():
    shape = config(layers=1, context=128)
    checkpoint = RandomCheckpoint(shape)
    vector = np.random.default_rng(0).standard_normal(shape.width) * 2
    options: dict[str, Any] = {"max_tokens": 3, "seed": 1, "end": False}
    steered = [Intervention("resid_post", Add(vector), positions="generated")]
    texts = []
    for make in (torch_model, cuda_model):
        with language_model(make(checkpoint), memory=1 << 20) as lm:
            plain = lm.generate([5, 6, 7], **options)
            text = lm.generate([5, 6, 7], interventions=steered, **options)
            again = lm.generate([5, 6, 7], **options)
            assert plain.tokens == again.tokens
            texts.append((plain.tokens, text.tokens))
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
