"""A small model for tests of the server in which the model itself proves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import unspool
from helpers.word_model import save_chatty
from unspool.server.runtime.registry import ModelEntry


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with a vocabulary of words and a chat template."""
    return save_chatty(tmp_path_factory.mktemp("small-model"))


@pytest.fixture(scope="session")
def small_entry(small_model: Path) -> ModelEntry:
    return ModelEntry("small", lambda: unspool.load(small_model, memory=8 << 20, threads=1), 1000)
