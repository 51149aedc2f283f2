"""Who judges: one judge a file, and the names by which people ask for them."""
