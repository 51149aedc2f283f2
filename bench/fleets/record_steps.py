"""`unspool` that records its engine's steps: python bench/fleets/record_steps.py LOG serve ...

When the process ends, LOG has the backend's limits and, for each step, its start, the block-table
slots of its texts and the positions that were computed. For a model on the CPU, the clock is the
process's CPU time, so that other processes on the core do not count; on a device, wall time.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from unspool.backends.step import StepBatch
from unspool.cli import main as unspool_main
from unspool.engine.loop import Loop

LIMITS = ("max_rows", "prefill_tokens", "prefill_beside_decode")


def record() -> dict[str, Any]:
    """Make all engines created later write their steps to the returned log."""
    log: dict[str, Any] = {"backend": {}, "steps": []}
    original = Loop.__init__

    def recording_init(self: Loop, backend: Any) -> None:
        original(self, backend)
        launch = backend.launch
        clock = time.perf_counter if backend.overlaps else time.process_time
        log["backend"] = {n: getattr(backend, n) for n in ("page_size", "page_count", "overlaps")}
        log["backend"] |= {name: getattr(backend.limits, name) for name in LIMITS}

        def recording_launch(batch: StepBatch) -> Any:
            firsts = batch.positions[batch.row_starts[:-1]]
            ends = batch.visible_end[batch.row_starts[1:] - 1]
            log["steps"].append((clock(), batch.slots.tolist(), firsts.tolist(), ends.tolist()))
            return launch(batch)

        backend.launch = recording_launch

    Loop.__init__ = recording_init  # type: ignore[method-assign]
    return log


if __name__ == "__main__":
    file = Path(sys.argv.pop(1))
    log = record()
    try:
        unspool_main()
    finally:
        file.write_text(json.dumps(log), encoding="utf-8")
