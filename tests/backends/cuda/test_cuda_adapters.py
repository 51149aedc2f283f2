"""Adapters on the GPU's kernels, by Triton's interpreter: what the plain backend computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.adapter_support import PROMPT, SHAPES, all_logits, random_adapter, with_adapters
from helpers.cuda_support import cuda_model, torch_model
from helpers.paged_texts import RandomCheckpoint, config
from helpers.parity import difference
from unspool.backends.cuda.adapters import CudaAdapters
from unspool.errors import UnspoolError

pytest.importorskip("triton")

CLOSE = 2e-4


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("gated", False),
        pytest.param("not gated, with biases, a window", False, marks=pytest.mark.slow),
        pytest.param("tied, all heads alike", False, marks=pytest.mark.slow),
        pytest.param("with experts", False, marks=pytest.mark.slow),
        pytest.param("gated", True, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_of_the_plain_backend(name: str, exact: bool) -> None:
    shape = config(**{"layers": 1, "context": 128, **SHAPES[name]})
    checkpoint = RandomCheckpoint(shape)
    expected = all_logits(with_adapters(torch_model(checkpoint)), PROMPT[:5])
    actual = all_logits(with_adapters(cuda_model(checkpoint, exact=exact)), PROMPT[:5])
    assert difference(actual, expected) < CLOSE
    bare, adapted, few, _, wide = expected[2::3][:5]
    assert min(np.abs(bare - other).max() for other in (adapted, few, wide)) > 0.05


def test_memory_is_freed_with_the_last_adapter_and_a_refusal_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = config(layers=1, context=128)
    model = cuda_model(RandomCheckpoint(shape))
    adapters = CudaAdapters(model.weights, 8)
    assert adapters.set(1, random_adapter(shape, 2, seed=1)), "graphs do not know its memory"
    before = {matrix: beside.down.clone() for matrix, beside in adapters._matrix_adapters.items()}

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError

    wide = random_adapter(shape, 40, seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(CudaAdapters, "_allocate", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            adapters.set(2, wide)
    assert adapters._matrix_adapters.keys() == before.keys()
    for matrix, down in before.items():
        assert torch.equal(adapters._matrix_adapters[matrix].down, down)
    with pytest.raises(UnspoolError, match="no adapter"):
        adapters.slots_for(np.array([2]))
    assert adapters.set(2, wide)
    assert not adapters.set(1, None) and adapters._matrix_adapters
    assert adapters.set(2, None) and not adapters._matrix_adapters, "graphs still know its memory"
    assert not adapters.set(2, None)
