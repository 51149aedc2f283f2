"""Puzzles with exact verifiers, where the order of generation matters."""
