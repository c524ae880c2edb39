"""A private run's configuration, the releases that follow from it, and the epsilon that they cost."""
