"""What can go wrong in a training, in words, with where to go on from."""

from __future__ import annotations

import errno

import torch

from unspool.errors import UnspoolError
from unspool.train.running.parallel import is_lost, lost
from unspool.train.running.runs import Run


class TrainingError(UnspoolError):
    """Training cannot go on; the last checkpoint is whole."""


def in_words(error: BaseException, run: Run | None, step: int) -> UnspoolError | None:
    """An error that a person can do something about; None: a bug, to be shown as it is."""
    message = None
    if isinstance(error, torch.OutOfMemoryError):
        message = (
            "the GPU's memory is full: give a smaller --batch (a step keeps its tokens), "
            "or --recompute"
        )
    elif isinstance(error, RuntimeError) and "CUDA error" in str(error):
        message = f"the GPU failed at step {step + 1} ({str(error).splitlines()[0]})"
    elif is_lost(error):
        message = str(lost(error))
    elif is_full(error):
        message = "the disk is full: make room"
    elif isinstance(error, OSError):
        message = f"the run's folder cannot be used ({error.strerror or error})"
    elif isinstance(error, UnspoolError):
        message = str(error)
    return None if message is None else TrainingError(f"{message}; {_where_to_go_on(run)}")


def is_full(error: BaseException) -> bool:
    """Whether the disk is; writing safetensors tells that in words only."""
    known = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return known or "os error 28" in str(error)


def _where_to_go_on(run: Run | None) -> str:
    saved = run.resumable() if run is not None else None
    if run is None or saved is None:
        return "there is no checkpoint to go on from"
    return (
        f"the checkpoint of step {saved.step} is whole, go on from it with: "
        f"unspool train --resume {run.folder}"
    )
