"""Operating the running service: its audit log, health and metrics."""
