"""Runs while they run: the scheduler, one run's execution, a port per silo, the dispatcher to sessions, checkpoints."""
