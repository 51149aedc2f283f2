"""Tokens from rows of logits, on the device: what `sampling/chain.py` does with ordinary settings.

Every truncation keeps the first so many candidates in one order (likeliest first, equals by lower
id). So a row is a line, and each question about it is the same: which candidate is the first at
which a sum along the line reaches a goal? It is answered without sorting, by few walks over the
row, each shared by many programs:

1. `measure`: the peak and the sum; a greedy row is done here.
2. `spread`: the candidates near enough to the peak to matter are thrown into bins by their depth
   below it, and it is seen in which few bins the borders and the draw will fall.
3. `gather`: the candidates of these bins. They are few, and `finish` finds the borders and the draw
   among them; where they are not, in the row itself.

Sums along the line are whole numbers of 2**-SHIFT: they are the same in whatever order they are
added, so a row's pick depends on nothing but the row. The last program of a row to end a walk does
what comes after it.
"""
