"""Twins of a causal model that write otherwise: by blocks, or in any order."""
