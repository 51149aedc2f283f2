"""Thinking longer: a search policy over the tree of tokens, a judge, and a budget in tokens."""
