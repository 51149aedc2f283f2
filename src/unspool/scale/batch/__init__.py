"""Batch inference: prompts from a file, answered on this machine or on a Ray cluster."""
