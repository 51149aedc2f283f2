"""Stored state: the folder, the database of texts, and how steps are written."""
