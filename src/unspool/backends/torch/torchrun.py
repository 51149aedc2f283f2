"""Whether this process is one of several that torchrun has started, found out without torch.

    torchrun --nproc-per-node 4 -m unspool serve --model large

Rank 0 runs the command, and the others hold their part of the model for it.
"""

from __future__ import annotations

import os
import sys


def ranks() -> int | None:
    """How many processes torchrun has started together; None: this is not one of several."""
    count = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    return count if count > 1 else None


def is_first() -> bool:
    return ranks() is None or os.environ.get("RANK") == "0"


def work_unless_first() -> None:
    """Any but the first process works for that one from here on, and ends with it."""
    if not is_first():
        from unspool.backends.torch.parallel.worker import work_for_torchrun

        work_for_torchrun()
        sys.exit(0)


def let_go() -> None:
    """The first process ends; if the others were never needed, they end too."""
    if ranks() is not None and is_first():
        from unspool.backends.torch.parallel.ranks import let_go_torchrun

        let_go_torchrun()
