"""Fixtures for tests of scale: a tiny chat model, and one local Ray for all Ray tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a vocabulary and a chat template."""
    from helpers.word_model import save_chatty

    return save_chatty(tmp_path_factory.mktemp("chatty"))


@pytest.fixture(scope="session")
def ray_here() -> Iterator[str]:
    """One local Ray for all tests of a worker process; its address."""
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=80 << 20,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
