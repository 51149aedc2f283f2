"""Shared by tests: tiny models, fake backends, running servers, reference implementations."""
