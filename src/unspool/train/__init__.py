"""Training: from text to model weights in a run folder."""
