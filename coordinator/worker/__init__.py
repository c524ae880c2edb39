"""The arithmetic of one run, which the service has done in a process of its own."""
