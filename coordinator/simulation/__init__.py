"""`coordinator simulate`: federations without a service, their sweeps, pictures of partitions, the privacy ablation."""
