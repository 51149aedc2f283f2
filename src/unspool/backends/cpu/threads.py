"""How many threads to use: the physical cores that this process may run on.

Two threads on one core share its arithmetic, and a container may be given less time than the
machine has cores; both would only make threads wait for each other.
"""

from __future__ import annotations

import os
from pathlib import Path

from unspool.errors import SettingsError

FORKED = "this model was loaded before the process was forked; load it in the child process"


def choose_threads(wanted: int | None, root: Path = Path("/")) -> int:
    """The number asked for, checked, or the number of cores we may use."""
    allowed = _allowed_processors()
    if wanted is None:
        cores = len({_core(number, root) for number in allowed})
        return max(1, min(cores, _time_allowed(root) or cores))
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise SettingsError(f"threads is {wanted!r}; it must be a whole number of at least 1")
    if wanted > len(allowed):
        raise SettingsError(
            f"threads is {wanted}, and this process may use {len(allowed)} "
            f"processor{'s' if len(allowed) > 1 else ''}; ask for at most that many"
        )
    return wanted


def _allowed_processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _core(processor: int, root: Path) -> tuple[str, str] | int:
    """What tells physical cores apart; the processor itself where the system does not say."""
    topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    try:
        package = (topology / "physical_package_id").read_text().strip()
        return package, (topology / "core_id").read_text().strip()
    except OSError:
        return processor


def _time_allowed(root: Path) -> int | None:
    """Whole processors' worth of time that the control groups give; None if they set no limit.

    Each group may only have what those around it leave: the narrowest counts.
    """
    found = [_limit_v2(folder) or _limit_v1(folder) for folder in _groups(root)]
    limits = [limit for limit in found if limit]
    return max(1, int(min(limits))) if limits else None


def _groups(root: Path) -> list[Path]:
    """The folders of the groups we are in, innermost first."""
    base = root / "sys/fs/cgroup"
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = base / controllers if controllers else base
        inner = top / path.strip("/")
        while inner != top and top in inner.parents:
            found.append(inner)
            inner = inner.parent
        found.append(top)
    return [*found, base, base / "cpu"]


def _limit_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _limit_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
