"""Shared by all endpoints: the server's state, its models, and the texts of a request."""
