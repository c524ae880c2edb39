"""A simulated federation beside a plain loop that does the same local steps."""
