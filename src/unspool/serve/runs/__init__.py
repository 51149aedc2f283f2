"""`/v1/runs`: training runs that can be watched, started, paused and stopped."""
