"""Scaling beyond one machine: server replicas and batch jobs on Ray."""

from __future__ import annotations

import os
from importlib.util import find_spec

from unspool.errors import UnspoolError


class RayMissingError(UnspoolError):
    """Ray is required but not installed."""


def require_ray(what: str = "this") -> None:
    """Raise RayMissingError if Ray is not installed. `what` is the subject of the message."""
    if find_spec("ray") is None:
        raise RayMissingError(
            f"{what} needs Ray, which is not installed: pip install 'unspool[ray]'"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
