"""Trains nothing, but keeps a run folder as the trainer does: for those who watch and ask.

python stand_in_trainer.py SOURCE --name NAME [--depth N --minutes M --seed S]
python stand_in_trainer.py --resume FOLDER
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from unspool.model.hub.find import runs_folder
from unspool.train.running.runs import Run

STEPS = 10_000


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("source", nargs="?")
    for name in ("--name", "--depth", "--minutes", "--seed", "--resume"):
        parser.add_argument(name)
    arguments = parser.parse_intermixed_args()
    if arguments.source == "missing.txt":
        print("unspool: missing.txt: there is no such file", file=sys.stderr)
        return 2
    if arguments.resume:
        run = Run(Path(arguments.resume))
        run.resume_here(resumed_as=arguments.kind)
    else:
        settings = {"source": arguments.source, "depth": int(arguments.depth)}
        run = Run.create(runs_folder() / arguments.name, "new", steps=STEPS, settings=settings)
    step = (run.log() or [{"step": 0}])[-1]["step"]
    if arguments.source == "nan.txt":
        run.update(state="failed", error="the loss became NaN at step 1; try a smaller rate")
        return 1
    while (want := run.requested_command()) != "stop" and step < STEPS:
        run.update(state="paused" if want == "pause" else "running")
        if want == "go":
            step += 1
            run.write_log(
                {"step": step, "tokens": step * 64, "loss": 3 + 2 / step, "seconds": step * 0.02}
            )
        time.sleep(0.02)
    run.update(state="stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
