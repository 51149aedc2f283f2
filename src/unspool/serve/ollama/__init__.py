"""Ollama's API, over the same core."""
