"""`unspool` with a record of its engine's steps: python bench/fleets/stepping.py LOG serve ...

When the process ends, LOG has what the backend is, and of each step when it began, and of which
text (by its line of the block table) it computed which positions.

Where the model runs on the processor, the clock is the process's own time on its core: what other
processes take of the core meanwhile does not count. Where it runs on a device, it is the time that
passes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from unspool.backends.step import StepBatch
from unspool.cli import main as unspool_main
from unspool.engine.loop import Loop


def record() -> dict[str, Any]:
    """Have every engine that is made from now on write its steps into what is given back."""
    log: dict[str, Any] = {"backend": {}, "steps": []}
    steps, usual = log["steps"], Loop.__init__

    def recording(self: Loop, backend: Any) -> None:
        usual(self, backend)
        limits, launch = backend.limits, backend.launch
        clock = time.perf_counter if backend.overlaps else time.process_time
        log["backend"] = {
            "page_size": backend.page_size,
            "page_count": backend.page_count,
            "overlaps": backend.overlaps,
            "max_rows": limits.max_rows,
            "prefill_tokens": limits.prefill_tokens,
            "prefill_beside_decode": limits.prefill_beside_decode,
        }

        def noted(batch: StepBatch) -> Any:
            firsts = batch.positions[batch.row_starts[:-1]]
            ends = batch.visible_end[batch.row_starts[1:] - 1]
            steps.append((clock(), batch.slots.tolist(), firsts.tolist(), ends.tolist()))
            return launch(batch)

        backend.launch = noted

    Loop.__init__ = recording  # type: ignore[method-assign]
    return log


def main() -> None:
    file = Path(sys.argv.pop(1))
    log = record()
    try:
        unspool_main()
    finally:
        file.write_text(json.dumps(log), encoding="utf-8")


if __name__ == "__main__":
    main()
