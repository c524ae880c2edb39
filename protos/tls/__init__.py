"""TLS 1.3 settings and why a connection fails."""
