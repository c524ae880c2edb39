"""What one bad hospital of six does to a model, by aggregator and attack."""
