"""The small model with the default model's vocabulary, in place of the default model."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def lm(small_lm: Any) -> Any:
    return small_lm
