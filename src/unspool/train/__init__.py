"""Training: from text to weights, in a folder that tells how it went."""
