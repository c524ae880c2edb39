"""Performance only: lazy tensors, a thread helper, a buffer pool."""
