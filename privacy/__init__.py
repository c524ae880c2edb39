"""The privacy layer: what a run's profile means for the doors, the guards and the accounting."""
