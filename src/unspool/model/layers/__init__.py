"""What a transformer's layers are made of, in plain torch."""
