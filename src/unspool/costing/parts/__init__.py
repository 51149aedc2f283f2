"""The parts of the report, one a file: each has `measure(lm, plan)` and gives a `Part`."""
