"""Steps captured as graphs: a whole step is one launch, however many kernels it has.

A graph holds for one number of lines, and for texts up to a length; the next larger one is taken,
with lines that only fill it up. It is captured when it is first needed: the step itself is run
kernel by kernel (which compiles them), and is then recorded for the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

LINE_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_TAKEN_BY = [next(size for size in LINE_COUNTS if size >= n) for n in range(LINE_COUNTS[-1] + 1)]
_SHORTEST = 512  # tokens: the least room of a graph


def padded(count: int) -> int:
    """So many lines has the graph that takes this many."""
    return _TAKEN_BY[count]


def room_for(length: int) -> int:
    """Of how long texts the graph is that takes texts of this length."""
    room = _SHORTEST
    while room < length:
        room *= 4
    return room


class Graphs:
    """Runs steps, from a graph where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        if self._captures:
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
            if self._captures:
                self._graphs[key] = self._captured(launch)

    def clear(self) -> None:
        """What was captured holds addresses that are no longer right."""
        if self._captures:
            torch.cuda.synchronize()  # the last step may still be using its graph's memory
            self._pool = torch.cuda.graph_pool_handle()  # the old one goes with its last graph
        self._graphs.clear()

    def _captured(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            launch()
        return graph
