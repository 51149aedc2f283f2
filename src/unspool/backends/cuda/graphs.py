"""Captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from unspool.gc_pause import gc_paused


class GraphCache:
    """Runs functions from captured graphs; captures those that are missing."""

    def __init__(self, device: torch.device) -> None:
        self.can_capture = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        if self.can_capture:
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
