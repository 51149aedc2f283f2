"""The parts of the report, one per file: each has `measure(lm, plan)` and returns a `Part`."""
