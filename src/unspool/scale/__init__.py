"""When one machine is not enough: replicas and batches on Ray, models and training on torch."""
