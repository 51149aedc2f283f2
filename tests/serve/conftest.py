"""A running server, shared by all tests of the API that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import Running, default_entry, running


@pytest.fixture(scope="session")
def server(default_model: Path) -> Iterator[Running]:
    """The default model, served."""
    with running([default_entry(default_model, memory=256 << 20)]) as found:
        yield found
