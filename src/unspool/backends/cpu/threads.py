"""Default thread count: the physical cores that this process may use.

Two threads on one core share its arithmetic units, and a container may have a smaller CPU quota
than the machine has cores; in both cases more threads would only wait for each other.
"""

from __future__ import annotations

import os
from pathlib import Path

from unspool.errors import SettingsError

FORKED = "this model was loaded before the process was forked; load it in the child process"


def choose_threads(requested: int | None, root: Path = Path("/")) -> int:
    """Return the requested number, checked, or the number of usable cores."""
    allowed = _allowed_processors()
    if requested is None:
        cores = len({_core(number, root) for number in allowed})
        return max(1, min(cores, _cgroup_quota(root) or cores))
    if not isinstance(requested, int) or isinstance(requested, bool) or requested < 1:
        raise SettingsError(f"threads must be an integer >= 1, got {requested!r}")
    if requested > len(allowed):
        raise SettingsError(
            f"threads must be <= {len(allowed)}, the processors this process may use, got "
            f"{requested}"
        )
    return requested


def _allowed_processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _core(processor: int, root: Path) -> tuple[str, str] | int:
    """Identity of a processor's physical core; the processor itself where that is unknown."""
    topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    try:
        package = (topology / "physical_package_id").read_text().strip()
        return package, (topology / "core_id").read_text().strip()
    except OSError:
        return processor


def _cgroup_quota(root: Path) -> int | None:
    """CPU quota of the control groups in whole processors, at least 1; None: no limit.

    Groups are nested, so the smallest quota applies.
    """
    quotas = [_limit_v2(folder) or _limit_v1(folder) for folder in _cgroup_folders(root)]
    limits = [limit for limit in quotas if limit]
    return max(1, int(min(limits))) if limits else None


def _cgroup_folders(root: Path) -> list[Path]:
    """Folders of this process's control groups, innermost first."""
    base = root / "sys/fs/cgroup"
    folders = []
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
            folders.append(inner)
            inner = inner.parent
        folders.append(top)
    return [*folders, base, base / "cpu"]


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
