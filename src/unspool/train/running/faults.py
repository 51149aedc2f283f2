"""Errors of a training run, with the checkpoint to resume from."""

from __future__ import annotations

import errno

import torch

from unspool.errors import UnspoolError
from unspool.train.running.parallel import is_process_lost, process_lost
from unspool.train.running.runs import Run


class TrainingError(UnspoolError):
    """Training cannot continue; the last checkpoint is intact."""


def explain_error(error: BaseException, run: Run | None, step: int) -> UnspoolError | None:
    """Turn an error that a user can fix into a message; None: a bug, to be raised as it is."""
    message = None
    if isinstance(error, torch.OutOfMemoryError):
        message = (
            "out of GPU memory: use a smaller --batch (the tokens per step stay the same), "
            "or --recompute"
        )
    elif isinstance(error, RuntimeError) and "CUDA error" in str(error):
        message = f"the GPU failed at step {step + 1} ({str(error).splitlines()[0]})"
    elif is_process_lost(error):
        message = str(process_lost(error))
    elif is_disk_full(error):
        message = "the disk is full: free some space"
    elif isinstance(error, OSError):
        message = f"the run's folder cannot be used ({error.strerror or error})"
    elif isinstance(error, UnspoolError):
        message = str(error)
    return None if message is None else TrainingError(f"{message}; {_resume_hint(run)}")


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk is full; safetensors reports that in its message only."""
    has_errno = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return has_errno or "os error 28" in str(error)


def _resume_hint(run: Run | None) -> str:
    checkpoint = run.resumable_checkpoint() if run is not None else None
    if run is None or checkpoint is None:
        return "there is no checkpoint to resume from"
    return (
        f"the checkpoint of step {checkpoint.step} is intact, resume from it with: "
        f"unspool train --resume {run.folder}"
    )
