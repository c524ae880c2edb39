"""TLS 1.3 on both sides, and diagnosis of failed connections."""
