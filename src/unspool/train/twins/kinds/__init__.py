"""Model, data and objective of each kind of twin."""
