"""Interpretability: read the activations that led to a token.

from unspool.lens.activations import look                  # attention and residuals of a position
from unspool.lens.logit_lens import logit_lens            # the prediction of each layer
from unspool.lens.attribution import attribution          # contribution of each layer to a logit
from unspool.lens.embeddings import neighbours            # tokens with similar embeddings
from unspool.lens.trace import trace_of                   # everything that led to a text ...
from unspool.lens.trace import load_trace, save_trace   # ... in a file
from unspool.lens.replay import replay                    # generate a saved text again and compare
"""
