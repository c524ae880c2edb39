"""Noise for released sums: its source, the discrete Gaussian, and the integer grid that sums and noise share."""
