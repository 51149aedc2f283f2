"""What several tests need: tiny models with and without words, heads, an engine of letters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool
from helpers import tiny
from helpers.drafts_support import fake_engine
from helpers.heads_support import save_eagle
from helpers.word_model import save_worded
from unspool.engine.engine import Engine


@pytest.fixture(scope="session")
def lm(small_lm: Any) -> Any:
    return small_lm


@pytest.fixture(scope="session")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model with a vocabulary of words."""
    folder = save_worded(tmp_path_factory.mktemp("worded"))
    return unspool.load(folder, backend="torch", memory=16 << 20)


@pytest.fixture(scope="session")
def worded_lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same with think tags."""
    folder = save_worded(tmp_path_factory.mktemp("thinking"), ("<think>", "</think>"))
    return unspool.load(folder, backend="torch", memory=8 << 20)


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("native")
    tiny.save("llama", folder)
    lm = unspool.load(folder, backend="native", memory=8 << 20)
    yield lm
    lm.close()


@pytest.fixture(scope="session")
def eagle(native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle")
    save_eagle(folder, native)
    return folder


@pytest.fixture(scope="module")
def letters() -> Iterator[Engine]:
    """Twelve letters that like to repeat themselves, so that drafts are often right."""
    probabilities = 0.15 * np.random.default_rng(5).dirichlet([0.3] * 12, (12, 12))
    for a, b in itertools.product(range(12), repeat=2):
        probabilities[a, b, (2 * b - a + 1) % 12] += 0.85
    engine = fake_engine(probabilities)
    yield engine
    engine.close()
