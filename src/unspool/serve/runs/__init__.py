"""`/v1/runs`: trainings that can be watched, looked back at, started, paused and stopped."""
