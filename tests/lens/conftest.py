"""Tiny models: one of every family, loaded when first asked for, and one with a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import unspool
from helpers import tiny


@pytest.fixture(scope="session")
def lm(small_lm: Any) -> Any:
    return small_lm


@pytest.fixture(scope="session")
def family_lm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    @cache
    def load(name: str) -> Any:
        folder = tmp_path_factory.mktemp(name)
        tiny.save(name, folder)
        # By default each would take gigabytes.
        return unspool.load(folder, backend="torch", memory=8 << 20)

    return load


@pytest.fixture(scope="session")
def torch_small(small_default: Any) -> Any:
    """The small model on torch, in 32 bits."""
    return unspool.load(small_default, backend="torch", memory=64 << 20)
