"""HTTP itself: the application, who may ask, errors, events, logs and metrics."""
