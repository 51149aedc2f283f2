"""Replicated servers: replicas under Ray Serve, and the gateway in front of them."""
