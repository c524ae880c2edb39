"""The hospital's key, certificate and pinned peers."""
