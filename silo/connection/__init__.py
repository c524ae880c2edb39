"""Everything that talks gRPC: connection, control session, transfer, retry."""
