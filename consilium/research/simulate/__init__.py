"""`coordinator simulate`: federations without a service, sweeps, trackers, pictures of partitions, the ablation."""
