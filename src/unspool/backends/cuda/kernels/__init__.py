"""Triton kernels. Each is tested against plain torch, in Triton's interpreter."""
