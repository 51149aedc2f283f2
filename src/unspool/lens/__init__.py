"""Looking inside: what led to a token, from the very numbers that wrote it.

from unspool.lens.look import look                        # attention and residuals of a position
from unspool.lens.logit_lens import logit_lens            # what each layer would have said
from unspool.lens.attribution import attribution          # which parts pushed a token
from unspool.lens.neighbours import neighbours            # tokens that lie close together
from unspool.lens.trace import trace_of                   # everything that led to a text ...
from unspool.lens.trace_file import load_trace, save_trace  # ... in a file
from unspool.lens.replay import replay                    # write a saved text again, and compare
"""
