"""Interpretability: read the activations that led to a token.

from unspool.lens.activations import look                  # attention and residuals of a position
from unspool.lens.logit_lens import logit_lens            # the prediction of each layer
from unspool.lens.affine_lens import fit_lens              # tuned and Jacobian lenses
from unspool.lens.attribution import attribution          # contribution of each layer to a logit
from unspool.lens.gradients import token_attribution      # contribution of each token, by gradients
from unspool.lens.embeddings import neighbours            # tokens with similar embeddings
from unspool.lens.trace import trace_of                   # everything that led to a text ...
from unspool.lens.trace import load_trace, save_trace   # ... in a file
from unspool.lens.activation_cache import activation_cache  # named arrays of a text ...
from unspool.lens.activation_files import save_activations  # ... and of thousands, in files
from unspool.lens.steering import fit_steering_vector     # directions that change what is written
from unspool.lens.patching import patch, ablate           # the effect of each activation
from unspool.lens.sae import load_sae                     # sparse autoencoders
from unspool.lens.replay import replay                    # generate a saved text again and compare
"""
