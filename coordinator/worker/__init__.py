"""The arithmetic of a run, in a process that the service starts."""
