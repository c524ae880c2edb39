"""The configuration of the privacy-budget ablation."""
