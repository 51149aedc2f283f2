"""Several servers as one: replicas under Ray Serve, and the gateway in front of them."""
