"""A private run's options, its planned releases, and their epsilon."""
