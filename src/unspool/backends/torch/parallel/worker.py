"""A rank that is not the first: it holds its part of the model and computes what it is told.

    python -m unspool.backends.torch.parallel.worker PORT RANK RANKS

is how the first rank starts others on its machine. Such a process ends when the first one does, in
whatever way: it then can read no more.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unspool.backends.torch.parallel.messages import Message
    from unspool.backends.torch.parallel.ranks import Ranks
    from unspool.backends.torch.parallel.transformer import SplitTransformer


def main(arguments: list[str]) -> None:
    """Started by the first rank."""
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    from unspool.backends.torch.parallel.ranks import Ranks
    from unspool.model.split import Share

    port, rank, count = map(int, arguments)
    work(Ranks.joined(port, Share(rank, count)))


def work_for_torchrun() -> None:
    """Started by torchrun, which ends all if one fails."""
    from unspool.backends.torch.parallel.ranks import Ranks

    ranks = Ranks.joined_torchrun()
    if ranks is not None:
        work(ranks)


def work(ranks: Ranks) -> None:
    """Do what the first rank says until it says that this is all."""
    from unspool.backends.torch.parallel.held import HeldPart

    models: dict[int, HeldPart] = {}
    try:
        while True:
            message = ranks.hear()
            if message.kind == "end":
                return
            if message.kind == "load":
                models[message.model] = HeldPart(_loaded(message, ranks))
                ranks.groups.least(0)
            elif message.kind == "forget":
                del models[message.model]
            else:
                models[message.model].obey(message)
    except BaseException as error:
        ranks.report(error)
        os._exit(1)  # where others wait for this one there is nothing to put in order


def _loaded(message: Message, ranks: Ranks) -> SplitTransformer:
    from pathlib import Path

    from unspool.backends.torch.parallel.loaded import digest
    from unspool.backends.torch.parallel.transformer import load_part
    from unspool.errors import ModelFileError
    from unspool.model.checkpoint import open_checkpoint
    from unspool.model.hub import find_model

    facts = message.facts
    path = Path(facts["path"])
    checkpoint = open_checkpoint(path if path.exists() else find_model(facts["name"] or None))
    if digest(checkpoint.config) != facts["config"]:
        raise ModelFileError(f"{checkpoint.path} is another model here than where rank 0 is")
    return load_part(checkpoint, ranks, facts["dtype"])


def _end_with_the_first() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
