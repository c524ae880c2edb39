"""`coordinator simulate`: federations without a service, sweeps, trackers, plots of partitions, the ablation."""

EVERY = 10
"""Default number of rounds between two checkpoints."""
