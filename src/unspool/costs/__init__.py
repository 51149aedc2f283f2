"""Measure the costs of autoregressive decoding: `unspool.measure_costs(lm)`."""
