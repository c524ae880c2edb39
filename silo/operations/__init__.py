"""Operation of the hospital's service: checks (`silo doctor`), liveness and metrics."""
