"""The running service seen from outside: whether it can do its work."""
