"""gRPC: the connection, the session over it, resumable transfers, retries."""
