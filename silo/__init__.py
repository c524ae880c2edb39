"""One hospital's service: it dials the coordinator, trains on data that never leaves, and owns its budget."""
