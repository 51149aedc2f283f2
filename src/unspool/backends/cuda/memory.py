"""How many pages of keys and values a GPU has room for."""

from __future__ import annotations

import warnings

import torch

from unspool.backends.cuda.pages import PAGE_SIZE, Pages, page_bytes
from unspool.backends.cuda.weights import Weights
from unspool.backends.memory import pages_in
from unspool.errors import UnspoolError, UnspoolWarning
from unspool.model.memory import in_words, share_beside_kernels

_MOST_TEXTS = 512  # pages for more texts of full length are never used
_LEAST = 16  # pages


def make_pages(weights: Weights, memory: int | None, context: int) -> Pages:
    """A pool in so many bytes (None: a share of what is free), or in fewer if they are not there.

    What does not fit is tried again smaller: other programs may take memory of a GPU at any time.
    """
    config, dtype, device = weights.config, weights.dtype, weights.device
    each = page_bytes(config, dtype)
    if memory is None:
        count = min(_share(device) // each, _MOST_TEXTS * -(-context // PAGE_SIZE))
    else:
        count = pages_in(memory, each)
    wanted = max(count, _LEAST)
    count = wanted
    while True:
        try:
            pages = Pages(config, count, dtype, device)
            break
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            if count <= _LEAST:
                raise UnspoolError(_no_room(device)) from error
            count = max(_LEAST, count * 3 // 4)
    if count < wanted:
        warnings.warn(
            f"{device} had no room for {in_words(wanted * each)} of keys and values; it has "
            f"{in_words(count * each)} for {count * PAGE_SIZE:,} tokens",
            UnspoolWarning,
            stacklevel=3,
        )
    return pages


def _share(device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30
    return share_beside_kernels(free)


def _no_room(device: torch.device) -> str:
    return (
        f"the memory of {device} is full: beside the weights there is no room for keys and "
        "values; end other programs on it, use a smaller model, or fewer bits a weight"
    )
