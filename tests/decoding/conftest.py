"""What several tests of drafting heads need: a tiny native model, and heads for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from heads_support import save_eagle, save_own

import unspool


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("native")
    tiny.save("llama", folder)
    lm = unspool.load(folder, backend="native", memory=8 << 20)
    yield lm
    lm.close()


@pytest.fixture(scope="module")
def own(native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    save_own(folder, native)
    return folder


@pytest.fixture(scope="module")
def eagle(native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle")
    save_eagle(folder, native)
    return folder
