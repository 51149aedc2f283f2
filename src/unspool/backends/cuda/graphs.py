"""Captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from unspool.gc_pause import gc_paused


class GraphCache:
    """Runs functions from captured graphs; captures those that are missing."""

    _pool: Any  # of memory for what the graphs compute in between
    _stream: torch.cuda.Stream

    def __init__(self, device: torch.device, beside: GraphCache | None = None) -> None:
        """`beside`: a cache whose memory and stream are used; never run both at the same time.

        For every stream in which a graph is captured, cuBLAS keeps 32 MB on a Hopper GPU.
        """
        self.can_capture = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        if self.can_capture:
            self._pool = torch.cuda.graph_pool_handle() if beside is None else beside._pool
            self._stream = torch.cuda.Stream(device) if beside is None else beside._stream

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        with torch.inference_mode():
            launch()
            if self.can_capture:
                self._graphs[key] = self._capture(launch)

    def clear(self) -> None:
        """Drop all graphs: a buffer that they use has moved."""
        if self.can_capture:
            torch.cuda.synchronize()  # the last step may still run
            self._pool = torch.cuda.graph_pool_handle()  # the old pool is freed with its last graph
        self._graphs.clear()

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # A graph of another model that the garbage collector frees meanwhile would end the capture.
        with (
            gc_paused(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            launch()
        return graph
