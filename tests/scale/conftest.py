"""Shared by the tests of scale: a tiny model that chats, and one Ray on this machine."""

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
    from decoding.worded import save_chatty

    return save_chatty(tmp_path_factory.mktemp("chatty"))


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Ray with two processors, on this machine, for all tests that one process runs."""
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()
