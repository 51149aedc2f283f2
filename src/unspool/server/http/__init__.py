"""HTTP transport: settings, sockets, middleware, errors, events and logs. Knows no models."""
