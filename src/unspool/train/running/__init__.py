"""A training from its first step to its last, in a folder that tells how it went."""
