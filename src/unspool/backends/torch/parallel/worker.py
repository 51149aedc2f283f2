"""The worker of ranks other than 0: holds a part of the model and runs the messages of rank 0.

    python -m unspool.backends.torch.parallel.worker PORT RANK RANKS

Rank 0 starts the others on its machine with this command. A worker exits when rank 0 does, however
it ends: its stdin is closed then.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unspool.backends.torch.parallel.model import SplitTransformer
    from unspool.backends.torch.parallel.ranks import RankMessage, Ranks


def world_size() -> int | None:
    """World size of torchrun; None if this process is not one of several."""
    count = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    return count if count > 1 else None


def is_rank_zero() -> bool:
    return world_size() is None or os.environ.get("RANK") == "0"


def run_worker_unless_rank_zero() -> None:
    """On ranks other than 0: compute for rank 0 until it ends, then exit."""
    if not is_rank_zero():
        work_for_torchrun()
        sys.exit(0)


def release_workers() -> None:
    """On rank 0, at exit: release the other ranks if they were never used."""
    if world_size() is not None and is_rank_zero():
        from unspool.backends.torch.parallel.ranks import release_torchrun

        release_torchrun()


def main(arguments: list[str]) -> None:
    """Entry point of a process that rank 0 started."""
    threading.Thread(target=_exit_with_rank_zero, daemon=True).start()
    from unspool.backends.torch.parallel.ranks import Ranks
    from unspool.model.files.sharding import TensorParallelRank

    port, rank, count = map(int, arguments)
    work(Ranks.join(port, TensorParallelRank(rank, count)))


def work_for_torchrun() -> None:
    """Work as one of torchrun's processes; torchrun stops all if one fails."""
    from unspool.backends.torch.parallel.ranks import Ranks

    ranks = Ranks.join_torchrun()
    if ranks is not None:
        work(ranks)


def work(ranks: Ranks) -> None:
    """Run the messages of rank 0 until it sends "end"."""
    from unspool.backends.torch.parallel.model import ModelPart

    models: dict[int, ModelPart] = {}
    try:
        while True:
            message = ranks.receive()
            if message.kind == "end":
                return
            if message.kind == "load":
                models[message.model] = ModelPart(_load(message, ranks))
                ranks.groups.minimum(0)  # wait for all ranks
            elif message.kind == "forget":
                del models[message.model]
            else:
                models[message.model].handle(message)
    except BaseException as error:
        ranks.report(error)
        os._exit(1)  # no cleanup: other ranks may be waiting for this one


def _load(message: RankMessage, ranks: Ranks) -> SplitTransformer:
    from pathlib import Path

    from unspool.backends.torch.parallel.model import digest, load_part
    from unspool.errors import ModelFileError
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.model.hub.find import find_model

    facts = message.facts
    path = Path(facts["path"])
    checkpoint = open_checkpoint(path if path.exists() else find_model(facts["name"] or None))
    if digest(checkpoint.config) != facts["config"]:
        raise ModelFileError(f"{checkpoint.path} is not the model that rank 0 loaded")
    return load_part(checkpoint, ranks, facts["dtype"])


def _exit_with_rank_zero() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
