"""How a search goes about it: one policy a file, each a short generator over a `Search`."""
