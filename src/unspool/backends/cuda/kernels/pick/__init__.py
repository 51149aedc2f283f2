"""Sampling on the device: what `sampling/chain.py` does with ordinary settings.

Every truncation keeps the first candidates of one ranking (highest logit first, ties by lower id).
So each question about a row is the same: at which candidate does a sum along the ranking reach a
goal? It is answered without sorting, by few passes over the row, each shared by many programs:

1. `summarize`: maximum and sum; greedy rows are done here.
2. `fill_bins`: candidates near enough to the maximum to matter are counted in bins by their depth
   below it, and the few bins with the borders of truncation and with the sampled token are found.
3. `gather`: the candidates of these bins. They are few, and `sample_tokens` finds the borders and
the
   token among them; if there are too many, in the row itself.

Sums along the ranking are integers in units of 2**-SHIFT: they are the same in any order of
addition, so the token depends on nothing but the row. The last program of a row to end a pass does
the work after it.
"""
