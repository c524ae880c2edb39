"""Everything that talks gRPC: the connection, the session over it, transfers that resume, when to try again."""
