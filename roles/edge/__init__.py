"""The only way in: TLS, keys of clients, and a list of what goes through to the model server."""
