"""Verifiers that score texts."""
