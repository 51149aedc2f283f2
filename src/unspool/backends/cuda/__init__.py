"""A model on an NVIDIA GPU: Triton kernels, and whole decode steps captured as graphs."""
