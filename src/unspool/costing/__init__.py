"""What writing one token at a time costs, measured: `unspool.costs(lm)`."""
