"""`coordinator simulate`, sweeps, the privacy ablation."""
