"""Noise that leaves with a sum: its source, the discrete Gaussian, and the integer grid that both share."""
