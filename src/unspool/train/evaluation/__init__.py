"""Evaluation: bits per byte, lm-eval tasks, sample sheets."""
