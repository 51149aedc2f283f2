"""CUDA graphs: a captured step is one launch, however many kernels it has.

A graph is captured for one batch size and one maximum context length. A step takes the next larger
graph and is padded with unused rows. Graphs are captured on first use: the step is launched kernel
by kernel (which compiles the kernels) and then recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_PADDED_SIZES = [
    next(size for size in BATCH_SIZES if size >= n) for n in range(BATCH_SIZES[-1] + 1)
]
_SHORTEST = 512  # tokens: the smallest captured context length


def padded_batch_size(count: int) -> int:
    """Smallest captured batch size that holds `count` rows."""
    return _PADDED_SIZES[count]


def length_bucket(length: int) -> int:
    """Smallest captured context length that holds `length` tokens."""
    bucket = _SHORTEST
    while bucket < length:
        bucket *= 4
    return bucket


class GraphCache:
    """Runs steps from captured graphs; captures those that are missing."""

    def __init__(self, device: torch.device) -> None:
        self._can_capture = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        if self._can_capture:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        with torch.inference_mode():
            launch()
            if self._can_capture:
                self._graphs[key] = self._capture(launch)

    def clear(self) -> None:
        """Drop all graphs: a buffer that they use has moved."""
        if self._can_capture:
            torch.cuda.synchronize()  # the last step may still run
            self._pool = torch.cuda.graph_pool_handle()  # the old pool is freed with its last graph
        self._graphs.clear()

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            launch()
        return graph
