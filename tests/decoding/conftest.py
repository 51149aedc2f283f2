"""What several tests of drafts need: an engine of letters, a tiny native model, heads for it."""

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
from helpers.heads_support import save_eagle, save_own
from unspool.engine.engine import Engine


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("native")
    tiny.save("llama", folder)
    lm = unspool.load(folder, backend="native", memory=8 << 20)
    yield lm
    lm.close()


@pytest.fixture(scope="module")
def unspool_head(native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unspool_head")
    save_own(folder, native)
    return folder


@pytest.fixture(scope="module")
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
