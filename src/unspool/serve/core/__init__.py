"""What all endpoints share: the server's state, its models, and the texts of a request."""
