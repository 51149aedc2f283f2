"""Ray is an extra: whoever needs it is told so in one sentence where it is missing."""

from __future__ import annotations

import os
from importlib.util import find_spec

from unspool.errors import UnspoolError


class RayMissingError(UnspoolError):
    """Ray is not installed, and what was asked for runs on it."""


def require_ray(what: str = "this") -> None:
    """Raises `RayMissingError` where `import ray` would fail. `what` begins the sentence."""
    if find_spec("ray") is None:
        raise RayMissingError(
            f"{what} needs Ray, which is not installed: pip install 'unspool[ray]'"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
