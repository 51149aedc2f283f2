"""Many small runs, and the law that they follow."""
