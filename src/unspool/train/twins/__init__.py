"""Twins of a causal model that write otherwise: by blocks, in any order, or as its drafter."""
