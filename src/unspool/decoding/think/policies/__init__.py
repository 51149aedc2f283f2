"""Search policies: each a short generator over a `Search`."""
