"""Models that are there learn something more."""
