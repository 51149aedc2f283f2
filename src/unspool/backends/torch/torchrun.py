"""Processes started by torchrun, detected without importing torch.

    torchrun --nproc-per-node 4 -m unspool serve --model large

Rank 0 runs the command; the others hold their part of the model and compute for it.
"""

from __future__ import annotations

import os
import sys


def world_size() -> int | None:
    """World size of torchrun; None if this process is not one of several."""
    count = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    return count if count > 1 else None


def is_rank_zero() -> bool:
    return world_size() is None or os.environ.get("RANK") == "0"


def run_worker_unless_rank_zero() -> None:
    """On ranks other than 0: compute for rank 0 until it ends, then exit."""
    if not is_rank_zero():
        from unspool.backends.torch.parallel.worker import work_for_torchrun

        work_for_torchrun()
        sys.exit(0)


def release_workers() -> None:
    """On rank 0, at exit: release the other ranks if they were never used."""
    if world_size() is not None and is_rank_zero():
        from unspool.backends.torch.parallel.ranks import release_torchrun

        release_torchrun()
