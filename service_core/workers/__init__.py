"""Processes that a service starts to compute: lines over their pipes, and calls in both directions."""
