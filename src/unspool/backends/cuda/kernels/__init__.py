"""Triton kernels, one idea a file. Each is tested against plain torch, in Triton's interpreter."""
