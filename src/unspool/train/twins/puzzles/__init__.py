"""Puzzles with exact judges, where the order in which an answer is written decides."""
