"""`coordinator simulate`: federations without a service, sweeps, trackers, pictures of partitions, the ablation."""

EVERY = 10
"""Rounds between two checkpoints."""
