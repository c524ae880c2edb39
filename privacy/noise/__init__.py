"""Noise sources (OS entropy or seed) and the discrete Gaussian."""
