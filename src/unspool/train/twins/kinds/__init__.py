"""The parts of each kind of twin."""
