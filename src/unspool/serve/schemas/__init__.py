"""What requests look like: checked before anything is done, and shown at `/docs`."""
