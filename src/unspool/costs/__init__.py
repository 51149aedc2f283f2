"""Measure the costs of autoregressive decoding: `unspool.costs(lm)`."""
