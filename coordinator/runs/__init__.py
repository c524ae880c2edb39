"""Runs while they run: the scheduler, a port per silo, the dispatcher to sessions, and checkpoints."""
