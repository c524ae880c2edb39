"""TLS 1.3 on both sides, and why a connection fails, in words that say what to do."""
