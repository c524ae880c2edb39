"""Run whole federations in one process, in several, or on Ray."""
