"""Record-level DP-SGD: clipped per-sample gradients, noisy class sums, the data factory."""
