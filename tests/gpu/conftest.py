"""Tests of the kernels as an NVIDIA GPU runs them: python -m pytest tests/gpu -m gpu

Kernels are compiled anew for every family, one process after the other; several processes share the
work: -n 8 --dist worksteal.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    if not mine:
        return
    import torch

    missing = pytest.mark.skip(reason="no NVIDIA GPU that torch can use")
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(missing)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda"
