"""A tiny model with a vocabulary, and with think tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import unspool
from helpers.word_model import save_worded


@pytest.fixture(scope="session")
def worded_lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = save_worded(tmp_path_factory.mktemp("worded"), ("<think>", "</think>"))
    lm = unspool.load(folder, backend="torch", memory=8 << 20)
    yield lm
    lm.close()
